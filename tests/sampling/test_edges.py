"""Regression tests of edge cases of sampling."""

from functools import partial
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch, chop_into_sequences
from flowrl.envs import MultiAgentEnv
from flowrl.envs.validation import InvalidStepError
from flowrl.policies import ConfigError, PolicySpec, ViewRequirement
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector

from .fakes import CountEnv, Idle, ObservedValue, WrongEnv

FLOAT = gym.spaces.Box(-np.inf, np.inf, (), np.float32)
COLLECTORS = {"columns": None, "rows": SimpleListCollector}


@pytest.fixture(params=list(COLLECTORS))
def collector(request):
    """None samples in columns, SimpleListCollector row by row."""
    return COLLECTORS[request.param]


def worker(env, policy=Idle, **config):
    return RolloutWorker(lambda context: env(), policy, {"rollout_fragment_length": 6, **config})


class ReusesDicts(MultiAgentEnv):
    """Returns the same dicts and arrays in every step."""

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


class ActsThree(Idle):
    def compute_actions(self, obs_batch, explore=True):
        return np.full((len(obs_batch), 2), 3), [], {}


def test_environment_may_reuse_its_dicts():
    rows = worker(ReusesDicts, {"p": ActsThree}).sample()["p"]
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["new_obs"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["rewards"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (rows["actions"] == 3).all()


class ClearsDictsInReset(ReusesDicts):
    """Also returns the same dict of flags, and clears all dicts in reset()."""

    def __init__(self):
        super().__init__()
        self.flags = {"__all__": False}

    def reset(self, *, seed=None, options=None):
        self.flags["__all__"], self.rewards["a"], self.infos["a"] = False, 0.0, {}
        return super().reset()

    def step(self, action_dict):
        obs, rewards, _, truncateds, infos = super().step(action_dict)
        self.flags["__all__"] = self.n == 3
        return obs, rewards, self.flags, truncateds, infos


def test_environment_may_clear_its_dicts_in_reset():
    rows = worker(ClearsDictsInReset, {"p": ActsThree}).sample()["p"]
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["rewards"].tolist() == [1, 2, 3, 1, 2, 3]
    assert rows["terminateds"].tolist() == [False, False, True] * 2
    assert [info["n"] for info in rows["infos"]] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("flag", [None, "no", 2])
def test_flags_of_agents_must_be_bools(flag):
    class WrongFlag(ReusesDicts):
        def step(self, action_dict):
            obs, rewards, _, truncateds, infos = super().step(action_dict)
            return obs, rewards, {"__all__": flag if self.n == 2 else False}, truncateds, infos

    with pytest.raises(ConfigError, match=f"the flag {flag!r}: the flags of sub-environment 0 are"):
        worker(WrongFlag, {"p": ActsThree}).sample()


def test_flag_that_is_an_array_is_named():
    class ArrayFlag(CountEnv):
        num_steps = 0

        def step(self, action):
            self.num_steps += 1
            obs, reward, _, _, info = super().step(action)
            flag = np.array([False, True]) if self.num_steps == 3 else False
            return obs, reward, flag, False, info

    with pytest.raises(ConfigError, match=r"the flag array.*: terminated and truncated are bools"):
        worker(ArrayFlag).sample()


def test_flag_at_the_end_of_an_episode_must_be_a_bool():
    class WrongFlag(CountEnv):
        num_steps = 0

        def step(self, action):
            self.num_steps += 1
            obs, reward, _, _, info = super().step(action)
            return obs, reward, "no" if self.num_steps == 3 else False, False, info

    with pytest.raises(ConfigError, match="the flag 'no': terminated and truncated are bools"):
        worker(WrongFlag).sample()


@pytest.mark.parametrize("step", [1, 2])
def test_info_must_be_a_dict(step):
    class TextInfo(CountEnv):
        def step(self, action):
            *returned, info = super().step(action)
            return (*returned, "text" if self.steps == step else info)

    match = r"step\(\) returned the info 'text': infos are dicts"
    with pytest.raises(ConfigError, match=match) as caught:
        worker(TextInfo).sample()
    assert "raised by sub-environment 0" in caught.value.__notes__[0]


class Scored(CountEnv):
    """Observes a small number; actions are a number in [-2, 2]."""

    observation_space = gym.spaces.Discrete(4)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float64)

    def observe(self):
        return self.steps % 4


BYTES = gym.spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("env", "kind", "space", "fits"),
    [
        (CountEnv, "action", gym.spaces.Discrete(3), False),
        (CountEnv, "action", gym.spaces.Discrete(1), True),
        (CountEnv, "observation", BYTES, False),  # would truncate
        (CountEnv, "observation", gym.spaces.Box(-5, 5, (2,), np.float64), True),
        (CountEnv, "observation", gym.spaces.Box(-5, 5, (3,)), False),
        (Scored, "observation", gym.spaces.Discrete(6), True),
        (Scored, "observation", gym.spaces.Discrete(3), False),
        (Scored, "action", gym.spaces.Box(-1.0, 1.0, (1,)), True),
        (Scored, "action", gym.spaces.Box(-2.0, 2.0, (1,)), True),
        (Scored, "action", gym.spaces.Box(-3.0, 3.0, (1,)), False),
    ],
)
def test_spaces_of_the_policy_must_fit_the_environment(env, kind, space, fits):
    own = {"observation": env.observation_space, "action": env.action_space, kind: space}
    policies = {"default_policy": PolicySpec(PPOTorchPolicy, own["observation"], own["action"])}
    if fits:
        assert worker(env, policies).sample().count == 6
        return
    with pytest.raises(ConfigError, match=rf"the {kind} space .* of policy 'default_policy' "):
        worker(env, policies).sample()


def test_callbacks_get_read_only_arrays():
    class WritesIntoObservation(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            episode.last_observation_for()[:] = -1

    with pytest.raises(ValueError, match="read-only"):
        worker(CountEnv, callbacks_class=WritesIntoObservation).sample()


class UnevenAgents(MultiAgentEnv):
    """`fast` always acts, `slow` every fourth step, `gone` ends after step 2. Never ends."""

    observation_space = gym.spaces.Box(-1, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = ["fast", "slow", "gone"]

    def __init__(self, agents=("fast", "slow", "gone")):
        self.agents = agents

    def observe(self):
        present = {"fast": True, "slow": self.n % 4 == 0, "gone": self.n <= 2}
        obs = np.full(1, self.n, np.float32)
        return {agent: obs.copy() for agent in self.agents if present[agent]}

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.n += 1
        ends = {"gone": True} if self.n == 2 and "gone" in self.agents else {}
        return self.observe(), {}, {**ends, "__all__": False}, {"__all__": False}, {}


class RecordsInputs(Idle):
    def __init__(self, *args):
        super().__init__(*args)
        self.recorded_inputs = []

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.recorded_inputs += [
            {n: v[i].copy() for n, v in input_dict.items()} for i in range(len(input_dict["obs"]))
        ]
        return super().compute_actions_from_input_dict(input_dict, explore)


def test_views_of_other_agents_cross_soft_horizons():
    w = worker(
        UnevenAgents, {"p": RecordsInputs}, horizon=6, soft_horizon=True, rollout_fragment_length=11
    )
    policy = w.policy_map["p"]
    policy.view_requirements["others"] = ViewRequirement(
        "obs", agents=["fast", "gone"], shift=[-1, 0]
    )
    rows = SampleBatch.concat_samples([w.sample()["p"] for _ in range(4)])
    acted = {}
    for inputs in policy.recorded_inputs:
        acted.setdefault(inputs["obs"][0], []).append(inputs)
    for row in rows.rows():
        assert any(
            np.array_equal(inputs["others"], row["others"])
            and np.array_equal(inputs["others_mask"], row["others_mask"])
            for inputs in acted[row["obs"][0]]
        ), row


class ChangesActions(UnevenAgents):
    """Removes the action of `slow` from its dict."""

    def step(self, action_dict):
        action_dict.pop("slow", None)
        return super().step(action_dict)


def test_environment_may_change_the_dict_of_actions():
    rows = [
        worker(env, {"p": Idle}, rollout_fragment_length=13).sample()["p"]
        for env in (UnevenAgents, ChangesActions)
    ]
    for name in ("obs", "actions", "rewards", "t"):
        np.testing.assert_array_equal(rows[0][name], rows[1][name])


class LongEpisodes(UnevenAgents):
    """`slow` and `fast`; the first episode has 3 steps, all others do not end."""

    num_episodes = 0

    def __init__(self):
        super().__init__(("fast", "slow"))

    def reset(self, *, seed=None, options=None):
        self.num_episodes += 1
        return super().reset(seed=seed, options=options)

    def step(self, action_dict):
        obs, rewards, _, _, infos = super().step(action_dict)
        ended = {"__all__": self.num_episodes == 1 and self.n == 3}
        return obs, rewards, ended, {"__all__": False}, infos


@pytest.mark.parametrize(
    ("mode", "horizon"),
    [("truncate_episodes", None), ("truncate_episodes", 9), ("complete_episodes", 9)],
)
def test_acting_views_of_flags_are_those_of_the_rows(mode, horizon):
    settings = {"batch_mode": mode, "horizon": horizon, "rollout_fragment_length": 4}
    w = worker(LongEpisodes, {"p": RecordsInputs}, **settings)
    policy = w.policy_map["p"]
    policy.view_requirements["ended"] = ViewRequirement("dones", shift=-1)
    rows = SampleBatch.concat_samples([w.sample()["p"] for _ in range(4)])
    acted = sorted((float(i["obs"][0]), bool(i["ended"])) for i in policy.recorded_inputs)
    trained = sorted((float(row["obs"][0]), bool(row["ended"])) for row in rows.rows())
    assert not any(ended for _, ended in trained)
    assert not any(ended for _, ended in acted)


def test_whole_episodes_of_a_vector_environment_are_saved():
    settings = {
        "num_envs_per_worker": 3, "vectorization_mode": "sync", "seed": 1,
        "batch_mode": "complete_episodes", "rollout_fragment_length": 50,
    }  # fmt: skip
    workers = [RolloutWorker("CartPole-v1", PPOTorchPolicy, settings) for _ in range(2)]
    workers[0].sample()
    workers[1].load_sampling_state_dict(workers[0].sampling_state_dict())
    expected, batch = (one.sample() for one in workers)
    assert expected.count >= 50
    assert batch.count >= 50


@pytest.mark.parametrize("fragment", [3, 20])
def test_soft_horizon_without_agents(fragment):
    w = worker(
        lambda: UnevenAgents(("gone",)), {"p": Idle}, horizon=5, soft_horizon=True,
        rollout_fragment_length=fragment,
    )  # fmt: skip
    assert sum(w.sample().env_steps() for _ in range(6)) == 6 * fragment


def test_reward_sums_of_more_agents_are_accepted():
    w = worker(lambda: UnevenAgents(("slow",)), {"p": PPOTorchPolicy}, normalize_rewards=True)
    w.policy_map["p"].reward_scaler.discounted_sums = np.ones(5)  # as saved by another sampler
    assert w.sample().env_steps() == 6
    assert len(w.policy_map["p"].reward_scaler.discounted_sums) == 1


def test_reward_sums_cross_soft_horizons():
    def reward_stats(**config):
        w = worker(lambda: UnevenAgents(("slow",)), {"p": PPOTorchPolicy}, normalize_rewards=True,
                   gamma=1.0, rollout_fragment_length=24, **config)  # fmt: skip
        w.sample()
        return w.reply_tags()["filters"][0]["p"]["rewards"]

    plain, soft = reward_stats(), reward_stats(horizon=2, soft_horizon=True)
    assert plain["count"] == soft["count"] > 3
    assert plain["mean"] == soft["mean"]


def test_new_episodes_use_the_current_initial_state():
    class LearnedState(Idle):
        start = 0.0

        def __init__(self, *args):
            super().__init__(*args)
            self.view_requirements |= self.recurrent_views(3)

        def get_initial_state(self):
            return [np.full(1, self.start, np.float32)]

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            states = input_dict["state_in_0"]
            return np.zeros(len(states), np.int64), [states], {"state": states[:, 0]}

    w = worker(lambda: CountEnv(3), LearnedState)
    w.sample()
    w.policy.start = 7.0
    batch = w.sample()
    # the running episode keeps its state
    assert batch["state"].tolist() == [0, 0, 0, 7, 7, 7]
    assert batch["state_in_0"][:, 0].tolist() == [0, 7]


def test_recreated_environments_get_new_seeds(collector):
    seeds = []

    class RecordsSeeds(CountEnv):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed)

    settings = {"sample_collector": collector, "max_num_env_restarts": 100}
    w = worker(lambda: RecordsSeeds(20, fail_at=(0, 10)), seed=1, **settings)
    for _ in range(12):
        w.sample()
    assert len(seeds) == len(set(seeds)) >= 5


def test_reward_views_have_the_same_dtype_for_acting_and_training(collector):
    w = worker(lambda: CountEnv(5), RecordsInputs, sample_collector=collector)
    w.policy.view_requirements["r"] = ViewRequirement("rewards", shift="-3:-1")
    batch = w.sample()
    assert batch["r"].dtype == np.float32
    assert {inputs["r"].dtype for inputs in w.policy.recorded_inputs} == {np.dtype(np.float32)}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_infos_belong_to_their_steps(mode, collector):
    vector = SyncVectorEnv([lambda: CountEnv(3, reuse=False)] * 2, autoreset_mode=mode)
    batch = worker(lambda: vector, sample_collector=collector, rollout_fragment_length=8).sample()
    assert [info["n"] for info in batch["infos"]] == (batch["t"] + 1).tolist()


def test_environment_may_reuse_its_info(collector):
    class ReusesInfo(CountEnv):
        info = {}

        def step(self, action):
            *rest, _ = super().step(action)
            self.info["n"] = self.steps
            return (*rest, self.info)

    batch = worker(lambda: ReusesInfo(20), sample_collector=collector).sample()
    assert [info["n"] for info in batch["infos"]] == [1, 2, 3, 4, 5, 6]


def test_filters_only_see_returned_rows(collector):
    environments = iter([CountEnv(20, fail_at=(0, 4)), CountEnv(20)])
    w = worker(
        lambda: next(environments),
        PPOTorchPolicy,
        sample_collector=collector,
        normalize_observations=True,
        normalize_rewards=True,
        rollout_fragment_length=9,
    )
    assert w.sample().count == 5
    updates = w.reply_tags()["filters"][0]["default_policy"]
    assert (updates["observations"]["count"], updates["rewards"]["count"]) == (5, 5)


def test_padding_does_not_overwrite_rows():
    with pytest.raises(ValueError, match="does not fit max_seq_len=3"):
        chop_into_sequences(
            feature_columns=[[1, 2, 3, 4, 5, 6, 7]],
            state_columns=[],
            max_seq_len=3,
            dynamic_max=False,
            seq_lens=[5, 2],
        )


class InvalidLastReward(CountEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return (observation, np.nan if self.steps == self.length else reward, *rest)


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_drop_mode_raises_if_every_episode_is_invalid(collector, mode):
    w = worker(
        lambda: InvalidLastReward(3, reuse=False),
        on_invalid_step="drop",
        max_num_env_restarts=3,
        sample_collector=collector,
        batch_mode=mode,
    )
    with pytest.raises(ValueError, match="reward that is not finite"):
        SampleBatch.concat_samples(w.sample() for _ in range(10))


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_failed_vector_environment_is_recreated(vector):
    created = []

    def creator():
        created.append(1)
        fail_at = (0, 2) if len(created) == 1 else None
        return vector([lambda: CountEnv(3, fail_at=fail_at, reuse=False)] * 2)

    w = worker(creator)
    with pytest.raises(ValueError, match="the environment broke"):
        w.sample()
    assert w.sample().count == 12
    w.stop()


def test_views_remove_columns_from_training(collector):
    w = worker(lambda: CountEnv(4), ObservedValue, sample_collector=collector)
    w.policy.view_requirements["vf_preds"] = ViewRequirement(used_for_training=False)
    assert "vf_preds" not in w.sample()
    view = w.policy.view_requirements["x"] = ViewRequirement("rewards", shift=-1)
    assert "x" in w.sample()
    view.used_for_training = False
    assert "x" not in w.sample()


def test_agent_view_after_the_first_fragment_raises():
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
def test_action_outside_its_space_raises(collector, space, action):
    class OtherActions(CountEnv):
        action_space = space

    class InvalidActions(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return np.array([action] * len(obs_batch)), [], {}

    with pytest.raises(ValueError, match="the action"):
        worker(OtherActions, InvalidActions, sample_collector=collector).sample()


def test_agent_with_other_action_space_needs_another_policy():
    class UnequalActions(UnevenAgents):
        def get_action_space(self, agent_id):
            return gym.spaces.Discrete(5 if agent_id == "fast" else 2)

    with pytest.raises(ConfigError, match=r"action space .* of policy 'p' .* of agent 'slow'"):
        worker(UnequalActions, {"p": Idle}).sample()


def test_view_of_agents_with_different_shapes_raises():
    class UnequalObservations(UnevenAgents):
        def get_observation_space(self, agent_id):
            return gym.spaces.Box(-1, 1e6, (3 if agent_id == "slow" else 1,), np.float32)

        def observe(self):
            return {
                agent: np.full(self.get_observation_space(agent).shape, self.n, np.float32)
                for agent in super().observe()
            }

    def view_of(agents):
        w = worker(
            UnequalObservations,
            {"p": RecordsInputs, "q": Idle},
            policy_mapping_fn=lambda agent: "q" if agent == "slow" else "p",
        )
        w.policy_map["p"].view_requirements["x"] = ViewRequirement("obs", agents=agents)
        return w.sample()["p"]["x"]

    assert view_of(["slow"]).shape[1:] == (1, 3)
    with pytest.raises(ConfigError, match="different shapes"):
        view_of(["slow", "fast"])


def test_environment_callback_does_not_change_sampling():
    class RecordsEnvs(DefaultCallbacks):
        indices = []

        def on_sub_environment_created(self, *, env_context, **kwargs):
            self.indices.append(env_context.vector_index)

    w = RolloutWorker(
        "CartPole-v1",
        ObservedCartPole,
        {
            "callbacks_class": RecordsEnvs,
            "vectorization_mode": "vector_entry_point",
            "num_envs_per_worker": 2,
        },
    )
    assert w.sample().count > 300

    class FailsOnCreation(DefaultCallbacks):
        def on_sub_environment_created(self, **kwargs):
            raise KeyError("callback failed")

    with pytest.raises(KeyError, match="callback failed"):
        worker(CountEnv, callbacks_class=FailsOnCreation)


class ObservedCartPole(Idle):
    pass


def test_horizon_overrides_every_time_limit(collector):
    def limited():
        return gym.wrappers.TimeLimit(gym.wrappers.TimeLimit(CountEnv(100), 5), 8)

    w = worker(limited, horizon=20, rollout_fragment_length=60, sample_collector=collector)
    w.sample()
    assert {e.episode_length for e in w.get_metrics()} == {20}


class TwoStepsAtATime(gym.Wrapper):
    def step(self, action):
        self.env.step(action)
        return self.env.step(action)


@pytest.mark.parametrize("settings", [{}, {"soft_horizon": True}])
def test_horizon_counts_the_steps_of_wrappers_that_skip_steps(collector, settings):
    def skipping():
        return TwoStepsAtATime(gym.wrappers.TimeLimit(CountEnv(100), 12))

    w = worker(
        skipping, horizon=10, rollout_fragment_length=40, sample_collector=collector, **settings
    )
    w.sample()
    assert {e.episode_length for e in w.get_metrics()} == {10}


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_columns_missing_in_some_batches_can_be_concatenated(mode):
    class OddEpisodes(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
            if postprocessed_batch["obs"][0, 0] == 1:
                postprocessed_batch["x"] = np.ones(postprocessed_batch.count)

    w = worker(lambda: CountEnv(3), callbacks_class=OddEpisodes, batch_mode=mode)
    joined = SampleBatch.concat_samples([w.sample(), w.sample()])
    assert joined["x"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_episodes_before_an_error_are_returned_afterwards():
    class FailsOnce(Idle):
        calls = 0

        def compute_actions(self, obs_batch, explore=True):
            self.calls += 1
            if self.calls == 8:
                raise RuntimeError("once")
            return super().compute_actions(obs_batch, explore)

    w = worker(
        lambda: CountEnv(3), FailsOnce, batch_mode="complete_episodes", rollout_fragment_length=9
    )
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
        (lambda g: (g[0], {"fast": None}, *g[2:]), "reward is one real number"),
        (lambda g: (g[0], dict.fromkeys(g[0]), *g[2:]), "the reward None"),
    ],
)
@pytest.mark.parametrize("on_invalid_step", ["raise", "replace", "drop"])
def test_invalid_multi_agent_results_are_named(change, message, on_invalid_step):
    class InvalidResult(UnevenAgents):
        def step(self, action_dict):
            return change(super().step(action_dict))

    with pytest.raises(ConfigError, match=message):
        worker(InvalidResult, {"p": Idle}, on_invalid_step=on_invalid_step).sample()


def test_multi_agent_env_may_be_a_gymnasium_env():
    class BothKinds(UnevenAgents, gym.Env):
        pass

    assert worker(BothKinds, {"p": Idle}).sample().env_steps() == 6
    with pytest.raises(ConfigError, match="requires gymnasium environments"):
        worker(UnevenAgents, {"p": Idle}, vectorization_mode="sync")


def test_memory_of_ended_agents_is_released():
    class ChangingAgents(UnevenAgents):
        def observe(self):
            return {agent: np.zeros(1, np.float32) for agent in (self.n // 3, self.n // 3 + 1)}

        def step(self, action_dict):
            obs, rewards, ends, cuts, infos = super().step(action_dict)
            return obs, rewards, {**ends, **{a: a not in obs for a in action_dict}}, cuts, infos

    w = worker(lambda: ChangingAgents(()), {"p": Idle}, rollout_fragment_length=60)
    for _ in range(5):
        w.sample()
    assert len(w.sampling_state_dict()["env_sampler"]["open"]["trajectories"]) <= 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rewards": np.ones(2)}, "column 'rewards', which is reserved for the sampler"),
        ({"x": np.ones(3)}, "column 'x' with 3 rows for 2"),
        ({"x": {"a": np.ones(2), "b": np.ones(3)}}, "column 'x' with 3 rows for 2"),
    ],
)
def test_invalid_extra_columns_of_a_policy_raise(collector, extra, message):
    class ReturnsExtra(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return np.zeros(len(obs_batch), np.int64), [], extra

    with pytest.raises(ValueError, match=message):
        worker(CountEnv, ReturnsExtra, sample_collector=collector, num_envs_per_worker=2).sample()


@pytest.mark.parametrize(
    "actions", [np.full(2, np.nan), np.full(2, 0.7), np.zeros((2, 1), np.int64), np.zeros(3, int)]
)
def test_actions_of_wrong_type_or_shape_raise(collector, actions):
    class InvalidActions(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return actions, [], {}

    with pytest.raises(ValueError, match=r"actions? |column"):
        worker(CountEnv, InvalidActions, sample_collector=collector, num_envs_per_worker=2).sample()


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
def test_observations_are_not_cast(collector, space, wrong):
    class WrongObservation(CountEnv):
        observation_space = space

        def observe(self):
            return wrong if self.steps == 3 else np.zeros(space.shape, space.dtype)

    with pytest.raises(ConfigError, match="does not fit the space"):
        worker(lambda: WrongObservation(5), sample_collector=collector).sample()


def test_reward_beyond_float32_raises(collector):
    class LargeReward(CountEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return (observation, 1e300, *rest)

    with np.errstate(over="ignore"), pytest.raises(ValueError, match="reward that is not finite"):
        worker(LargeReward, sample_collector=collector).sample()


def test_creator_without_return_value_raises():
    with pytest.raises(ConfigError, match="does it return the environment"):
        worker(lambda: None)


def test_step_with_four_values_raises(collector):
    class FourValueStep(CountEnv):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(ConfigError, match=r"step\(\) must return \(observation"):
        worker(FourValueStep, sample_collector=collector).sample()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs_per_worker": 0}, "num_envs_per_worker: input should be greater"),
        ({"num_envs_per_worker": 2.5}, "num_envs_per_worker"),
        ({"rollout_fragment_length": "x"}, "rollout_fragment_length"),
        ({"seed": -1}, "seed"),
        ({"no_done_at_end": "never"}, "no_done_at_end: input should be a valid boolean"),
        ({"sample_async": "ahead"}, "sample_async"),
        ({"env_config": 5}, "env_config: input should be a valid dict"),
        ({"callbacks_class": 5}, "callbacks_class"),
    ],
)
def test_settings_in_a_mapping_are_validated(settings, message):
    with pytest.raises(ConfigError, match=message):
        worker(CountEnv, **settings)


@pytest.mark.parametrize("settings", [{}, {"count_steps_by": "agent_steps"}])
def test_episode_in_which_no_agent_acts_any_more_is_rejected(settings):
    w = worker(lambda: UnevenAgents(()), {"p": Idle}, rollout_fragment_length=2000, **settings)
    with pytest.raises(ConfigError, match="no agent acted in the last 1000 steps of sub-environ"):
        w.sample()


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_evaluation_is_greedy_when_sampling_rows(mode):
    from flowrl.algorithms.ppo import PPOConfig

    class Zeros(gym.Env):
        """Rewards the action 0."""

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
    config.rollouts(rollout_fragment_length=50).callbacks(EpisodeEnds)
    with config.build() as algorithm:
        algorithm.train()
        greedy = algorithm.evaluate(episodes=2)
        assert greedy["episode_reward_mean"] in (0, 50)
        assert 0 < algorithm.evaluate(episodes=2, explore=True)["episode_reward_mean"] < 50
        assert algorithm.compute_single_action(np.ones(1, np.float32)) in (0, 1)
        with pytest.raises(ConfigError, match=r"observation: expected an array of shape \(1,\)"):
            algorithm.compute_single_action(np.ones(2, np.float32))


class EpisodeEnds(DefaultCallbacks):
    def on_episode_end(self, **kwargs):
        pass


def test_evaluation_ignores_soft_horizons():
    from flowrl.algorithms.ppo import PPOConfig

    config = PPOConfig(env="CartPole-v1", seed=1, horizon=5, soft_horizon=True)
    with config.build() as algorithm:
        assert algorithm.evaluate(episodes=3)["episode_len_mean"] > 5


class OneTooMany(gym.Env):
    """Returns an observation that is not in its Discrete space."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, nested):
        self.nested = nested
        number = gym.spaces.Discrete(3)
        self.observation_space = gym.spaces.Dict({"room": number}) if nested else number
        self.steps = 0

    def observation(self):
        room = 3 if self.steps == 2 else 1
        return {"room": room} if self.nested else room

    def reset(self, *, seed=None, options=None):
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        return self.observation(), 0.0, False, False, {}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("collector", [None, SimpleListCollector])
def test_observation_that_the_policy_cannot_read_names_the_environment(nested, collector):
    worker = RolloutWorker(
        lambda: OneTooMany(nested), PPOTorchPolicy, {"sample_collector": collector}
    )
    where = r"sub-environment 0 returned .*obs\['room'\] is 3" if nested else "sub-environment 0"
    with pytest.raises(InvalidStepError, match=where):
        worker.sample()


def test_observation_that_an_agents_policy_cannot_read_names_the_agent():
    class Rooms(MultiAgentEnv):
        observation_space = gym.spaces.Discrete(3)
        action_space = gym.spaces.Discrete(2)
        possible_agents = ("a", "b")

        def reset(self, *, seed=None, options=None):
            return {"a": 0, "b": 5}, {}

        def step(self, actions):
            raise AssertionError

    worker = RolloutWorker(lambda: Rooms(), PPOTorchPolicy, {})
    with pytest.raises(InvalidStepError, match="sub-environment 0 returned for agent 'b'"):
        worker.sample()


@pytest.mark.parametrize("shape", [(4, 1), (3,), None], ids=["broadcast", "missing axis", "lists"])
def test_observations_of_vector_environments_have_the_shape_of_the_space(shape):
    class Wrong(gym.vector.VectorEnv):
        metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        num_envs = 4
        single_observation_space = gym.spaces.Box(-1, 1, (3,))
        single_action_space = gym.spaces.Discrete(2)
        observation_space = gym.spaces.Box(-1, 1, (4, 3))
        action_space = gym.spaces.MultiDiscrete([2] * 4)

        def reset(self, *, seed=None, options=None):
            return ([[0.0] * 3] * 4 if shape is None else np.zeros(shape, np.float32)), {}

    worker = RolloutWorker(lambda context: Wrong(), ObservedValue, {})
    with pytest.raises(ConfigError, match=r"expected an array of shape \(4, 3\)"):
        worker.sample()


@pytest.mark.parametrize(("wrong", "found"), [(None, "obs is None"), ({"x": 1}, "obs is a dict")])
def test_observations_that_are_no_arrays_are_named(wrong, found):
    worker = RolloutWorker(lambda context: WrongEnv(obs=wrong), PPOTorchPolicy)
    with pytest.raises(ConfigError, match=found):
        worker.sample()


class Turns(MultiAgentEnv):
    """Two agents take turns; each step rewards both."""

    possible_agents = [0, 1]
    observation_space = gym.spaces.Box(-1, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    rewards: ClassVar[dict] = {0: 10.0, 1: 1.0}

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return {0: np.zeros(1, np.float32)}, {}

    def step(self, action_dict):
        self.n += 1
        obs = {self.n % 2: np.full(1, self.n, np.float32)}
        return obs, dict(self.rewards), {"__all__": self.n >= 6}, {"__all__": False}, {}


class RecordsReturns(DefaultCallbacks):
    def on_episode_start(self, *, worker, episode, **kwargs):
        assert worker.episode(episode.episode_id) is episode

    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["return"] = episode.total_reward


class RecordsReturnsToo(RecordsReturns):
    pass


class SeesRewards(Idle):
    """Has a view of earlier rewards, so that the sampler keeps rows of earlier fragments."""

    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements["before"] = ViewRequirement("rewards", FLOAT, shift="-5:-1")

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        return self.compute_actions(input_dict["obs"])


@pytest.mark.parametrize("callbacks", [RecordsReturns, RecordsReturnsToo])
@pytest.mark.parametrize("case", ["turns", "whole episodes", "earlier rows"])
def test_total_reward_of_a_resumed_episode_is_its_return(case, callbacks):
    def make_env(context):
        return Turns() if case == "turns" else CountEnv(2 if context.vector_index else 7)

    settings = {"rollout_fragment_length": 3}
    policy = SeesRewards if case == "earlier rows" else Idle
    if case != "turns":
        settings["num_envs_per_worker"] = 2
    if case == "whole episodes":
        settings["batch_mode"] = "complete_episodes"
    first = RolloutWorker(make_env, policy, {**settings, "callbacks_class": RecordsReturns})
    first.sample()
    second = RolloutWorker(make_env, policy, {**settings, "callbacks_class": callbacks})
    second.load_sampling_state_dict(first.sampling_state_dict())
    second.sample()
    second.sample()
    episodes = second.get_metrics()
    assert any(episode.episode_return > 20 for episode in episodes)
    assert all(e.custom_metrics["return"] == e.episode_return for e in episodes)


class KeepsEpisodes(DefaultCallbacks):
    episodes: ClassVar[list] = []

    def on_episode_step(self, *, episode, **kwargs):
        pass

    def on_episode_end(self, *, episode, **kwargs):
        self.episodes.append((episode.total_reward, sum(episode.agent_rewards.values())))


def test_rewards_that_float32_cannot_represent_are_replaced_in_games_with_turns():
    class Huge(Turns):
        rewards: ClassVar[dict] = {0: 1e39, 1: 2.0}

    sampler = worker(Huge, on_invalid_step="replace", callbacks_class=KeepsEpisodes)
    batch = sampler.sample()["default_policy"]
    assert batch["agent_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["rewards"].tolist() == [0, 0, 0, 4, 4, 2]
    assert KeepsEpisodes.episodes == [(10.0, 10.0)]


def test_info_of_a_first_observation_is_a_copy():
    class ReusesInfos(Turns):
        info: ClassVar[dict] = {}

        def reset(self, **options):
            self.info["step"] = 0
            return super().reset(**options)[0], {0: self.info}

        def step(self, action_dict):
            *result, _ = super().step(action_dict)
            self.info["step"] = self.n
            return *result, {self.n % 2: self.info}

    class KeepsFirst(DefaultCallbacks):
        seen: ClassVar[list] = []

        def on_episode_start(self, *, episode, **kwargs):
            episode.user_data["first"] = episode.last_info_for(0)

        def on_episode_step(self, *, episode, **kwargs):
            self.seen.append(episode.user_data["first"]["step"])

    worker(ReusesInfos, callbacks_class=KeepsFirst, rollout_fragment_length=3).sample()
    assert KeepsFirst.seen == [0, 0, 0]


@pytest.mark.parametrize("reward", [1 + 2j, np.complex64(1j), np.array("3.5"), [[1], [1, 2]]])
@pytest.mark.parametrize("env", ["single agent", "agents together", "turns"])
def test_rewards_that_are_no_real_numbers_are_permanent_errors(env, reward):
    class Wrong(Turns):
        rewards: ClassVar[dict] = {0: reward, 1: 1.0}

        def reset(self, **options):
            super().reset(**options)
            agents = (0,) if env == "turns" else (0, 1)
            return {agent: np.zeros(1, np.float32) for agent in agents}, {}

        def step(self, action_dict):
            _, *result = super().step(action_dict)
            agents = (self.n % 2,) if env == "turns" else (0, 1)
            return {agent: np.ones(1, np.float32) for agent in agents}, *result

    make = (lambda: WrongEnv(reward=reward)) if env == "single agent" else Wrong
    with pytest.raises(ConfigError, match="a reward is one real number") as caught:
        worker(make).sample()
    notes = " ".join(caught.value.__notes__)
    assert "sub-environment 0" in notes
    assert env == "single agent" or "for agent 0" in notes


def test_wrong_flags_of_several_agents_name_the_environment():
    class NoFlags(Turns):
        def step(self, action_dict):
            observations, rewards, *_ = super().step(action_dict)
            return observations, rewards, {}, {}, {}

    with pytest.raises(ConfigError, match="__all__") as caught:
        worker(NoFlags, num_envs_per_worker=2).sample()
    assert "raised by sub-environment 0" in caught.value.__notes__

    class NoObservations(Turns):
        def reset(self, **options):
            return None, {}

    with pytest.raises(ConfigError, match="reset") as caught:
        worker(NoObservations).sample()
    assert "raised by sub-environment 0" in caught.value.__notes__

    class WrongShape(Turns):
        def step(self, action_dict):
            _, *result = super().step(action_dict)
            return {1: np.zeros(3, np.float32)}, *result

    with pytest.raises(ConfigError, match="does not fit the space") as caught:
        worker(WrongShape, on_invalid_step="drop").sample()
    assert caught.value.__notes__[:2] == ["returned for agent 1", "raised by sub-environment 0"]


class Postprocesses(DefaultCallbacks):
    def on_postprocess_trajectory(self, **kwargs):
        pass


@pytest.mark.parametrize("callbacks", [DefaultCallbacks, Postprocesses])
@pytest.mark.parametrize(("mode", "recommends"), [("flowrl", True), ("sync", False)])
def test_drop_is_only_recommended_where_it_is_supported(mode, recommends, callbacks):
    invalid = np.array([np.nan, 0], np.float32)
    sampler = worker(
        lambda: WrongEnv(obs=invalid), vectorization_mode=mode, callbacks_class=callbacks
    )
    with pytest.raises(InvalidStepError) as caught:
        sampler.sample()
    assert ('"drop" drops the episode' in str(caught.value)) == recommends


class NestedVectorEnv(gym.vector.VectorEnv):
    metadata: ClassVar[dict] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space = gym.spaces.Dict(
        a=gym.spaces.Box(-1, 1, (3,), np.float32), n=gym.spaces.Discrete(5)
    )
    single_action_space = gym.spaces.Discrete(2)
    observation_space = gym.vector.utils.batch_space(single_observation_space, 2)
    action_space = gym.vector.utils.batch_space(single_action_space, 2)

    def __init__(self, **changed):
        good = {"a": np.full((2, 3), 0.5, np.float32), "n": np.array([1, 2])}
        self.obs = good | changed

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, actions):
        return self.obs, np.ones(2), np.zeros(2, bool), np.zeros(2, bool), {}


@pytest.mark.parametrize(
    "changed",
    [
        {"a": np.zeros((2, 1), np.float32)},
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.zeros((4, 3), np.float32)},
        {"n": np.array([1.7, 2.2])},
        {"b": np.zeros(2)},
    ],
)
def test_nested_observations_of_a_vector_environment_must_fit_its_space(changed):
    assert worker(NestedVectorEnv, rollout_fragment_length=2).sample().count == 4
    with pytest.raises(ConfigError, match="an observation does not fit the space Dict") as caught:
        worker(lambda: NestedVectorEnv(**changed), rollout_fragment_length=2).sample()
    assert "returned by the NestedVectorEnv, for 2 environments" in caught.value.__notes__


@pytest.mark.parametrize(
    "final", [{"a": np.zeros(1), "n": 1}, {"a": np.zeros(3), "n": 1.7}, {"a": np.zeros(3)}]
)
def test_final_observations_of_a_vector_environment_must_fit_its_space(final):
    class EndsAtOnce(NestedVectorEnv):
        metadata: ClassVar[dict] = {"autoreset_mode": AutoresetMode.SAME_STEP}

        def step(self, actions):
            finals = np.array([final, final], object)
            return self.obs, np.ones(2), np.ones(2, bool), np.zeros(2, bool), {"final_obs": finals}

    with pytest.raises(ConfigError, match="an observation does not fit the space Dict") as caught:
        worker(EndsAtOnce, rollout_fragment_length=2).sample()
    assert 'returned by the EndsAtOnce, as infos["final_obs"]' in caught.value.__notes__


def test_soft_horizon_replaces_an_equal_time_limit():
    def make_env():
        return gym.wrappers.TimeLimit(CountEnv(100), 4)

    rows = worker(make_env, horizon=4, soft_horizon=True, rollout_fragment_length=12).sample()
    assert not rows["truncateds"].any()
    assert rows["t"].tolist() == [0, 1, 2, 3] * 3
    assert rows["obs"].tolist() == [[0, step] for step in range(12)]


def test_env_steps_of_complete_episodes_are_counted_once_after_a_resume():
    class FailsOnce(Idle):
        calls: ClassVar[list] = []

        def compute_actions(self, obs_batch, explore=True):
            self.calls.append(None)
            if len(self.calls) == 8:
                raise ValueError("once")
            return super().compute_actions(obs_batch, explore)

    settings = {"batch_mode": "complete_episodes", "sample_async": True}
    first = worker(lambda: CountEnv(3), FailsOnce, rollout_fragment_length=20, **settings)
    with pytest.raises(ValueError, match="once"):
        first.sample()
    second = worker(lambda: CountEnv(3), FailsOnce, rollout_fragment_length=20, **settings)
    second.load_sampling_state_dict(first.sampling_state_dict())
    assert second.sample().count == second.env_steps == 21
    first.stop()
    second.stop()


def test_a_state_that_cannot_be_loaded_changes_no_counts():
    class FailsOnStart(DefaultCallbacks):
        fails = False

        def on_episode_start(self, **kwargs):
            if self.fails:
                raise OSError("disk full")

    class Other(FailsOnStart):
        pass

    def make(callbacks, **options):
        env = partial(CountEnv, 3, **options)
        return worker(env, callbacks_class=callbacks, rollout_fragment_length=5)

    saved = make(FailsOnStart, fail_at=(1, 2))
    saved.sample()
    saved.sample()
    loading = make(Other)
    before = loading.sample()
    loading.reply_tags()
    FailsOnStart.fails = True
    with pytest.raises(OSError, match="disk full"):
        loading.load_sampling_state_dict(saved.sampling_state_dict())
    FailsOnStart.fails = False
    after = loading.sample()
    assert loading.env_steps == before.count + after.count == 10
    assert loading.reply_tags()["env_restarts"] == 0
    assert before["eps_id"].max() < after["eps_id"].min() <= before["eps_id"].max() + 2


@pytest.mark.parametrize(
    ("added", "error", "message"),
    [
        (None, TypeError, "must return a dict of columns, it returned None"),
        ({"x": 1.0}, ValueError, r"returned 'x' of shape \[\], expected \[4, 3, …\]"),
        ({"x": np.zeros((3, 4))}, ValueError, r"of shape \[3, 4\], expected \[4, 3, …\]"),
    ],
)
def test_columns_of_postprocess_fragment_are_checked(added, error, message):
    class Adds(PPOTorchPolicy):
        def postprocess_fragment(self, fragment):
            return added

    settings = {"num_envs_per_worker": 3, "rollout_fragment_length": 4}
    worker = RolloutWorker("CartPole-v1", Adds, settings)
    with pytest.raises(error, match=message):
        worker.sample()


def test_values_after_a_fragment_are_checked():
    class OneValue(PPOTorchPolicy):
        calls = 0

        def compute_values(self, obs_batch):
            return super().compute_values(obs_batch)[: None if len(obs_batch) > 3 else 1]

    settings = {"num_envs_per_worker": 3, "rollout_fragment_length": 4}
    worker = RolloutWorker("CartPole-v1", OneValue, settings)
    with pytest.raises(ValueError, match=r"returned values of shape \(1,\) for 3"):
        worker.sample()
