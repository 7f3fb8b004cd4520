"""Several agents: joining and leaving, turns, rewards, and policy mapping."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.data import MultiAgentBatch
from flowrl.data.checkpoint import CheckpointError
from flowrl.envs import (
    MultiAgentEnv,
    ParallelPettingZooEnv,
    PettingZooEnv,
    make_multi_agent,
)
from flowrl.policies import ConfigError, Policy, PolicySpec, ViewRequirement
from flowrl.policies.policy_spec import PolicyMapping
from flowrl.sampling import DefaultCallbacks, RolloutWorker, WorkerSet
from tests.extras import require_extra

from .fakes import CountEnv, Idle, ObservedValue


class Script(MultiAgentEnv):
    """Plays a script with one dict per step.

    A dict has agent -> (reward, terminated, truncated) of the observed agents; "rewards" and "ends"
    are for other agents. An observation is (agent id, env step).
    """

    observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = [0, 1, 2, 3]

    def __init__(self, first, *steps, truncated=False):
        self.first, self.steps, self.truncated = first, steps, truncated
        self.acted = []

    def observation(self, agent):
        return np.array([agent, self.now], np.float32)

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return {agent: self.observation(agent) for agent in self.first}, {}

    def step(self, action_dict):
        self.acted.append(sorted(action_dict))
        script = self.steps[self.now]
        self.now += 1
        observed = {agent: v for agent, v in script.items() if agent not in ("rewards", "ends")}
        last = self.now == len(self.steps)
        return (
            {agent: self.observation(agent) for agent in observed},
            {agent: v[0] for agent, v in observed.items()} | script.get("rewards", {}),
            {a: v[1] for a, v in observed.items()}
            | script.get("ends", {})
            | {"__all__": last and not self.truncated},
            {a: v[2] for a, v in observed.items()} | {"__all__": last and self.truncated},
            {agent: {"step": self.now} for agent in observed},
        )


def play(script, fragment=None, policies=("p",), mapping=None, **config):
    """Return a worker with a scripted environment."""
    return RolloutWorker(
        lambda context: script,
        dict.fromkeys(policies, ObservedValue),
        {
            "rollout_fragment_length": fragment or len(script.steps),
            "policy_mapping_fn": mapping or (lambda agent_id: policies[0]),
            **config,
        },
    )


def rows_of(batch, agent, policy="p"):
    rows = batch[policy]
    rows = rows.take_rows(np.flatnonzero(rows["obs"][:, 0] == agent))
    names = ("t", "rewards", "terminateds", "truncateds")
    return list(zip(*(rows[name].tolist() for name in names), strict=True))


REWARD = (1.0, False, False)


def test_agents_that_act_in_every_step():
    script = Script([0, 1], {0: REWARD, 1: REWARD}, {0: REWARD, 1: REWARD})
    batch = play(script).sample()
    assert isinstance(batch, MultiAgentBatch)
    assert (batch.env_steps(), batch.agent_steps()) == (2, 4)
    assert script.acted == [[0, 1], [0, 1]]
    for agent in (0, 1):
        assert rows_of(batch, agent) == [(0, 1.0, False, False), (1, 1.0, True, False)]


def test_rewards_between_turns_are_summed():
    # agent 0 acts at steps 0 and 2, agent 1 at step 1; the reward of agent 0 has three parts
    script = Script(
        [0],
        {1: (0.0, False, False), "rewards": {0: 10.0}},
        {0: (5.0, False, False)},
        {1: (2.0, False, False)},
        {"rewards": {0: 7.0, 1: 3.0}},
    )
    batch = play(script).sample()
    assert script.acted == [[0], [1], [0], [1]]
    assert rows_of(batch, 0) == [(1, 15.0, False, False), (3, 7.0, True, False)]
    assert rows_of(batch, 1) == [(2, 2.0, False, False), (3, 3.0, True, False)]
    rows = batch["p"]
    # without a final observation, the latest one is used
    last = rows["new_obs"][rows["terminateds"]].tolist()
    assert sorted(last) == [[0.0, 2.0], [1.0, 3.0]]
    assert (batch.env_steps(), batch.agent_steps()) == (4, 4)


def test_agents_may_end_early_and_join_late():
    script = Script(
        [0, 1],
        {0: (1.0, True, False), 1: REWARD},
        {1: REWARD, 2: (9.0, False, False)},
        {1: REWARD, 2: REWARD},
    )
    worker = play(script)
    batch = worker.sample()
    assert script.acted == [[0, 1], [1], [1, 2]]
    assert rows_of(batch, 0) == [(0, 1.0, True, False)]
    assert rows_of(batch, 2) == [(2, 1.0, True, False)]  # the reward 9.0 preceded its first action
    assert batch["p"]["agent_index"].tolist() == [0, 1, 1, 1, 2]
    (episode,) = worker.get_metrics()
    assert episode.agent_returns == [("0", "p", 1.0), ("1", "p", 3.0), ("2", "p", 1.0)]
    assert episode.episode_return == 5.0


def test_returning_agent_starts_a_new_trajectory():
    script = Script(
        [0, 1], {0: (1.0, True, False), 1: REWARD}, {0: REWARD, 1: REWARD}, {0: REWARD, 1: REWARD}
    )
    batch = play(script).sample()
    assert rows_of(batch, 0) == [(0, 1.0, True, False), (2, 1.0, True, False)]
    rows = batch["p"].take_rows(np.flatnonzero(batch["p"]["obs"][:, 0] == 0))
    assert len(set(rows["unroll_id"])) == 2
    assert len(set(rows["eps_id"])) == 1


def test_agent_may_end_without_a_final_observation():
    script = Script(
        [0, 1], {1: REWARD, "rewards": {0: 4.0}, "ends": {0: True}}, {1: REWARD}, {1: REWARD}
    )
    batch = play(script).sample()
    assert rows_of(batch, 0) == [(0, 4.0, True, False)]
    assert script.acted == [[0, 1], [1], [1]]


def test_agent_that_ends_with_its_first_observation_has_no_rows(caplog):
    script = Script([0], {0: REWARD, 1: (3.0, True, False)}, {0: REWARD})
    batch = play(script).sample()
    assert rows_of(batch, 1) == []
    assert "has no observation yet" in caplog.text


def test_time_limit_truncates_all_agents():
    script = Script(
        [0, 1], {0: REWARD, 1: REWARD}, {0: REWARD, "rewards": {1: 7.0}}, truncated=True
    )
    batch = play(script).sample()
    assert rows_of(batch, 0)[-1] == (1, 1.0, False, True)
    assert rows_of(batch, 1)[-1] == (1, 7.0, False, True)
    values = batch["p"]["next_values"][batch["p"]["truncateds"]]
    assert (values != 0).all()


@pytest.mark.parametrize("soft", [False, True])
def test_horizon_keeps_every_reward(soft):
    steps = [{0: REWARD, "rewards": {1: 7.0}}] * 5
    script = Script([0, 1], *steps)
    worker = play(script, 4, horizon=2, soft_horizon=soft)
    batch = worker.sample()
    assert batch.env_steps() == 4
    assert sum(r for _, r, _, _ in rows_of(batch, 0)) == 4
    if soft:
        assert not (batch["p"]["truncateds"] | batch["p"]["terminateds"]).any()
        assert rows_of(batch, 1) == []  # its row is not complete
        assert len(set(batch["p"]["eps_id"])) == 2
    else:
        assert rows_of(batch, 1) == [(1, 14.0, False, True)] * 2
    assert [e.episode_length for e in worker.get_metrics()] == [2, 2]


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 3), st.tuples(st.just(1.0), st.booleans(), st.just(False)), max_size=4
        ),
        min_size=1,
        max_size=8,
    ),
    st.sets(st.integers(0, 3)),
    st.integers(1, 5),
)
@settings(max_examples=50)
def test_rows_are_consistent_for_any_schedule(steps, first, fragment):
    script = Script(sorted(first), *steps)
    worker = play(script, fragment)
    batches = [worker.sample() for _ in range(6)]
    for batch in batches:
        assert batch.env_steps() == fragment
        if "p" not in batch:
            continue
        for row in batch["p"].rows():
            agent, observed_at = row["obs"]
            assert observed_at <= row["t"]
            assert row["new_obs"][0] == agent
            assert row["new_obs"][1] in (
                row["t"] + 1,
                observed_at,
            )  # the latter without a final observation
    # each agent acts at most once in a step
    for acted, before in zip(script.acted[1:], script.acted, strict=False):
        assert len(set(acted)) == len(acted), before
    total = sum(batch.agent_steps() for batch in batches)
    actions = sum(len(acted) for acted in script.acted)
    assert 0 <= actions - total <= 4  # rows that are not complete


# -- policies -------------------------------------------------------------------------------------


class FourStepEnv(MultiAgentEnv):
    """Agents with different observation spaces that all act for four steps."""

    def __init__(self, agents=("a", "b", "c")):
        self.possible_agents = list(agents)
        self.observation_spaces = {
            agent: gym.spaces.Box(0, 9, (i + 1,), np.float32) for i, agent in enumerate(agents)
        }
        self.action_spaces = dict.fromkeys(agents, gym.spaces.Discrete(3))

    def observe(self):
        return {
            a: np.full(s.shape, self.now, np.float32) for a, s in self.observation_spaces.items()
        }

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.now += 1
        done = self.now == 4
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        return self.observe(), rewards, {"__all__": done}, {"__all__": False}, {}


def test_policies_use_the_spaces_of_their_agents():
    worker = RolloutWorker(
        lambda context: FourStepEnv(),
        {agent: PolicySpec(PPOTorchPolicy) for agent in "abc"},
        {"policy_mapping_fn": lambda agent_id, **kwargs: agent_id, "seed": 1},
    )
    shapes = {pid: p.observation_space.shape for pid, p in worker.policy_map.items()}
    assert shapes == {"a": (1,), "b": (2,), "c": (3,)}
    batch = worker.sample()
    assert {pid: rows["obs"].shape[1] for pid, rows in batch.policy_batches.items()} == {
        "a": 1,
        "b": 2,
        "c": 3,
    }
    assert "advantages" in batch["a"]
    # policies with the same class and seed have different weights
    same = [RolloutWorker("CartPole-v1", dict.fromkeys("xy", PPOTorchPolicy),
                          {"seed": 1, "policy_mapping_fn": lambda a: "x"}).policy_map]  # fmt: skip
    weights = [p.get_weights()["hidden.0.weight"] for p in same[0].values()]
    assert not np.array_equal(*weights)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda agent, worker, ep: (ep, worker), ("E", "W")),
        (lambda agent, ep, worker: (ep, worker), ("E", "W")),
        (lambda agent, a, b: (a, b), ("E", "W")),
        (lambda agent, worker: (None, worker), (None, "W")),
        (lambda agent, x, episode: (episode, x), ("E", "W")),
    ],
)
def test_parameters_of_a_mapping_function_are_matched_by_name_then_by_order(function, expected):
    seen = []

    def mapping(*args, **kwargs):
        seen.append(function(*args, **kwargs))
        return "p"

    mapping.__signature__ = inspect.signature(function)
    assert PolicyMapping(mapping, ["p"], "W")("agent", "E") == "p"
    assert seen == [expected]


def test_all_agents_of_a_policy_share_one_call():
    calls = []

    class CountsCalls(ObservedValue):
        def compute_actions(self, obs_batch, explore=True):
            calls.append(len(obs_batch))
            return super().compute_actions(obs_batch, explore)

    script = [
        Script([0, 1, 2], {0: REWARD, 1: REWARD, 2: REWARD}, {0: REWARD, 1: REWARD, 2: REWARD})
        for _ in range(2)
    ]
    RolloutWorker(
        lambda context: script[context.vector_index],
        {"p": CountsCalls},
        {"num_envs_per_worker": 2, "rollout_fragment_length": 2},
    ).sample()
    assert calls == [6, 6]


def test_policy_mapping_is_fixed_for_an_episode():
    calls = []

    def mapping(agent_id, episode, worker, **kwargs):
        calls.append((agent_id, episode is not None))
        return "pq"[len(calls) % 2]

    script = Script([0], *([{0: REWARD}] * 4))
    worker = play(script, 8, policies=("p", "q"), mapping=mapping)
    calls.clear()
    batch = worker.sample()
    assert calls == [(0, True)] * 3  # two complete episodes and a running one
    assert {pid: rows.count for pid, rows in batch.policy_batches.items()} == {"p": 4, "q": 4}


def test_postprocessing_gets_batches_of_other_agents():
    inputs = []

    class TeamReward(ObservedValue):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            agent_id = int(sample_batch["obs"][0, 0])
            others = {
                agent: rows["rewards"].sum() for agent, (_, rows) in other_agent_batches.items()
            }
            inputs.append((agent_id, others, episode.length))
            return sample_batch.with_columns(team=np.full(sample_batch.count, sum(others.values())))

    script = Script([0, 1, 2], *([{0: REWARD, 1: (2.0, False, False), 2: REWARD}] * 3))
    worker = RolloutWorker(
        lambda context: script,
        {"p": TeamReward, "q": ObservedValue},
        {
            "rollout_fragment_length": 3,
            "policy_mapping_fn": lambda agent_id: "q" if agent_id == 2 else "p",
        },
    )
    batch = worker.sample()
    assert inputs == [(0, {1: 6.0, 2: 3.0}, 3), (1, {0: 3.0, 2: 3.0}, 3)]
    assert batch["p"]["team"].tolist() == [9.0] * 3 + [6.0] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_mapping_fn": lambda agent_id: "x"}, "maps agent 'a' to 'x'"),
        ({}, "policy_mapping_fn"),
        ({"policy_mapping_fn": "p"}, "must be a function"),
        ({"multiagent": {"policy_maping_fn": len}}, "Did you mean 'policy_mapping_fn'"),
    ],
)
def test_invalid_mappings_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(
            lambda context: FourStepEnv(), {"p": ObservedValue, "q": ObservedValue}, settings
        ).sample()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: (*result[:2], {}, *result[3:]), r'terminateds\["__all__"\]'),
        (lambda result: (*result[:3], {}, *result[4:]), r'truncateds\["__all__"\]'),
        (lambda result: ([1, 2], *result[1:]), "observations as a dict by agent id"),
        (lambda result: (result[0], 1.0, *result[2:]), "rewards as a dict by agent id"),
        (lambda result: (result[0], {"a": "1"}, *result[2:]), "reward is one real number"),
        (lambda result: ({"a": np.zeros(7, np.float32)}, *result[1:]), "shape"),
        (lambda result: ({"x": np.zeros(1, np.float32)}, *result[1:]), "space of agent 'x'"),
    ],
)
def test_invalid_results_of_an_environment_raise(change, message):
    class InvalidResult(FourStepEnv):
        def step(self, action_dict):
            return change(super().step(action_dict))

    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda context: InvalidResult("a"), {"p": Idle}, {}).sample()


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({}, "at least one"),
        ("p", "a mapping from policy id"),
        ({3: None}, "must be a non-empty string"),
        ({"p": 5}, "PolicySpec"),
        ({"p": None}, "needs a policy_class"),
    ],
)
def test_invalid_policies_raise(policies, message):
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda context: FourStepEnv("a"), policies, {})


def test_agent_whose_policy_has_another_space_raises():
    worker = RolloutWorker(
        lambda context: FourStepEnv("ab"), {"p": ObservedValue}, {"rollout_fragment_length": 4}
    )
    with pytest.raises(ConfigError, match=r"policy 'p' cannot represent .* of agent 'b'"):
        worker.sample()


@pytest.mark.parametrize("agent", [b"a", frozenset("a")])
def test_agent_id_that_checkpoints_cannot_contain_raises(agent):
    worker = RolloutWorker(
        lambda context: FourStepEnv([agent]), {"p": ObservedValue}, {"rollout_fragment_length": 4}
    )
    with pytest.raises(ConfigError, match=r"the agent id .* which checkpoints cannot contain"):
        worker.sample()


# -- views of other agents ------------------------------------------------------------------------


class RecordsInputs(Idle):
    """Records its inputs; its actions differ from step to step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.recorded_inputs = []

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.recorded_inputs += [
            {name: value[i].copy() for name, value in input_dict.items()}
            for i in range(len(input_dict["obs"]))
        ]
        actions = input_dict["obs"].sum(1).astype(np.int64) % 2
        return actions, [], {}


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 2), st.tuples(st.just(1.0), st.booleans(), st.just(False)), max_size=3
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.sampled_from([0, -1, [-1, 0], "-2:0"]),
)
@settings(max_examples=40)
def test_views_of_other_agents_are_equal_for_acting_and_training(steps, fragment, shift):
    script = Script([0, 1, 2], *steps)
    worker = RolloutWorker(
        lambda context: script, {"p": RecordsInputs}, {"rollout_fragment_length": fragment}
    )
    policy = worker.policy_map["p"]
    policy.view_requirements["others"] = ViewRequirement("obs", shift=shift, agents=[1, 2])
    policy.view_requirements["prev_actions"] = ViewRequirement(
        "actions", shift=-1, agents=[0, 1, 2]
    )
    batches = [worker.sample() for _ in range(6)]
    acted = {tuple(inputs["obs"]): [] for inputs in policy.recorded_inputs}
    for inputs in policy.recorded_inputs:
        acted[tuple(inputs["obs"])].append(inputs)
    for batch in batches:
        if "p" not in batch:
            continue
        for row in batch["p"].rows():
            candidates = acted[tuple(row["obs"])]
            names = ("others", "others_mask", "prev_actions", "prev_actions_mask")
            assert any(all(np.array_equal(c[n], row[n]) for n in names) for c in candidates), row
            if shift == 0:
                for i, agent in enumerate((1, 2)):
                    if row["others_mask"][i]:
                        assert row["others"][i].tolist() == [agent, row["obs"][1]]
                    else:
                        assert not row["others"][i].any()


def test_view_of_all_other_agents():
    script = Script([0, 1], *([{0: REWARD, 1: REWARD}] * 2))
    worker = play(script)
    worker.policy_map["p"].view_requirements["others"] = ViewRequirement("obs", agents="others")
    rows = worker.sample()["p"]
    assert rows["others"].shape == (4, 3, 2)
    assert rows["others_mask"].tolist() == [[True, False, False]] * 4
    assert rows["others"][:, 0, 0].tolist() == [1, 1, 0, 0]


# -- training --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_on_actors_sample_all_agents(ray_session):
    workers = WorkerSet(
        lambda context: FourStepEnv(),
        None,
        {
            "policies": {
                "a": PolicySpec(PPOTorchPolicy),
                "b": PolicySpec(PPOTorchPolicy),
                "c": PolicySpec(ConstantActions),
            },
            "policy_mapping_fn": lambda agent_id, **kwargs: agent_id,
            "rollout_fragment_length": 8,
            "num_workers": 1,
        },
    )
    batches = next(iter(workers.parallel_iterator().batch_across_shards().take(1)))
    assert [batch.agent_steps() for batch in batches] == [24]
    workers.stop()


def three_policy_config():
    return (
        PPOConfig(seed=1, train_batch_size=200, sgd_minibatch_size=32, num_sgd_iter=2)
        .environment(env=lambda context: FourStepEnv())
        .multi_agent(
            policies={
                "a": PolicySpec(),
                "b": PolicySpec(config={"lr": 1e-3, "gamma": 0.5}),
                "c": PolicySpec(config=PPOConfig(lr=2e-3)),
            },
            policy_mapping_fn=lambda agent_id, **kwargs: agent_id,
            policies_to_train=["a", "b"],
        )
    )


def test_only_policies_to_train_are_trained():
    config = three_policy_config()
    assert config.for_policy("b").lr == 1e-3
    assert config.for_policy("c").lr == 2e-3
    with config.build() as algorithm:
        frozen = algorithm.workers.local_worker().policy_map["c"].get_weights()
        result = algorithm.train()
        assert set(result["info"]["learner"]) == {"a", "b"}
        assert result["policy_reward_mean"] == {"a": 4.0, "b": 4.0, "c": 4.0}
        assert result["agent_reward_mean"] == {"a": 4.0, "b": 4.0, "c": 4.0}
        assert result["episode_reward_mean"] == 12.0
        assert result["num_agent_steps_sampled"] == 3 * result["num_env_steps_sampled"]
        after = algorithm.workers.local_worker().policy_map["c"].get_weights()
        assert all(np.array_equal(frozen[name], after[name]) for name in frozen)
        policies = algorithm.workers.local_worker().policy_map
        assert policies["b"].config.gamma == 0.5
        assert policies["c"].config.lr == 2e-3


@pytest.mark.parametrize(
    "mapping",
    [
        lambda aid, ep, worker: aid if ep is None or ep.length >= 0 else worker.x,
        lambda agent_id, worker, episode: agent_to_policy(agent_id, worker, episode),
        lambda agent_id, *, episode: agent_id if episode is None else str(agent_id),
        lambda agent_id, **kwargs: agent_id if set(kwargs) == {"episode", "worker"} else "",
        str,
        {agent: agent for agent in "abc"}.__getitem__,
    ],
)
def test_mapping_functions_may_have_any_signature(mapping):
    w = RolloutWorker(
        lambda context: FourStepEnv(), dict.fromkeys("abc", Idle), {"policy_mapping_fn": mapping}
    )
    assert set(w.sample().policy_batches) == set("abc")


def agent_to_policy(agent_id, worker, episode):
    assert isinstance(worker, RolloutWorker)
    assert episode is None or episode.worker is worker
    return agent_id


def test_error_in_a_mapping_function_is_named():
    def broken(agent_id):
        raise KeyError(agent_id)

    with pytest.raises(KeyError) as caught:
        RolloutWorker(
            lambda context: FourStepEnv(), dict.fromkeys("ab", Idle), {"policy_mapping_fn": broken}
        )
    assert "policy_mapping_fn for agent 'a'" in "".join(caught.value.__notes__)


def test_mapping_function_that_needs_an_episode_is_not_an_error_before_the_first_one():
    def by_episode(agent_id, episode):
        return "ab"[episode.episode_id % 2]

    class OneSpace(FourStepEnv):
        def __init__(self):
            super().__init__("xy")
            self.observation_spaces["y"] = self.observation_spaces["x"]

    w = RolloutWorker(
        lambda context: OneSpace(), dict.fromkeys("ab", Idle), {"policy_mapping_fn": by_episode}
    )
    assert set(w.sample().policy_batches) <= set("ab")


def test_empty_dict_space_of_a_spec_is_used():
    spec = PolicySpec(Idle, observation_space=gym.spaces.Dict({}))
    w = RolloutWorker(lambda context: FourStepEnv(), {"p": spec}, {})
    assert w.policy_map["p"].observation_space == gym.spaces.Dict({})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PolicySpec(int), "policy_class of 'p'"),
        (PolicySpec("PPO"), "policy_class of 'p'"),
        (PolicySpec(Idle, config=5), "config of 'p' must be a mapping"),
        (
            PolicySpec(Idle, config={"num_workers": 2}),
            "'num_workers' in the config of 'p' is a setting of the run",
        ),
        (
            PolicySpec(Idle, config={"total_timesteps": 7}),
            "'total_timesteps' in the config of 'p' is a setting of the run",
        ),
        (PolicySpec(Idle, config={"gama": 0.5}), "gama"),
    ],
)
def test_invalid_specs_raise(spec, message):
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda context: FourStepEnv("a"), {"p": spec}, {})


class OpposedAgents(MultiAgentEnv):
    """Two agents; each is rewarded for its own index as action."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = ["zero", "one"]

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.observe(), {}

    def observe(self):
        # the second agent is observed every fifth step
        agents = self.possible_agents if self.n % 5 == 0 else ["zero"]
        return {agent: np.zeros(1, np.float32) for agent in agents}

    def step(self, action_dict):
        self.n += 1
        rewards = {a: float(self.possible_agents[x] == a) for a, x in action_dict.items()}
        return self.observe(), rewards, {"__all__": self.n == 20}, {"__all__": False}, {}


def test_each_policy_learns_its_own_task():
    config = (
        PPOConfig(env=lambda context: OpposedAgents(), train_batch_size=400, seed=1, lr=3e-3)
        .rollouts(num_envs_per_worker=2)
        .multi_agent(policies=["zero", "one"])
        .multi_agent(policy_mapping_fn=lambda agent_id: agent_id)
    )
    with config.build() as algorithm:
        for _ in range(12):
            result = algorithm.train()
        # 80 rows of the second policy are fewer than a minibatch
        assert result["info"]["learner"]["one"]["num_agent_steps_trained"] < 128
        assert algorithm.evaluate(episodes=3)["episode_reward_mean"] == 24


class ConstantActions(Policy):
    """Does not learn."""

    def compute_actions(self, obs_batch, explore=True):
        return np.ones(len(obs_batch), np.int64), [], {}


def test_policy_that_cannot_learn_is_saved_and_restored(tmp_path):
    config = three_policy_config()
    config.multi_agent(policies={**config.policies, "c": PolicySpec(ConstantActions)})
    with config.build() as algorithm:
        assert set(algorithm.train()["info"]["learner"]) == {"a", "b"}
        algorithm.save(tmp_path / "c")
        algorithm.restore(tmp_path / "c")
        with pytest.raises(NotImplementedError, match="ConstantActions has no learn_on_batch"):
            algorithm.get_policy("c").learn_on_batch(None)
        with pytest.raises(ValueError, match="has no weights"):
            algorithm.get_policy("c").set_weights({"w": np.zeros(1)})


def test_checkpoint_of_other_policies_changes_nothing(tmp_path):
    with three_policy_config().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    other = three_policy_config()
    other.multi_agent(
        policies={**other.policies, "c": PolicySpec(config={"model": {"fcnet_hiddens": [8]}})}
    )
    with other.build() as other_algorithm:
        before = other_algorithm.workers.local_worker().get_weights()
        with pytest.raises(CheckpointError, match="does not fit"):
            other_algorithm.restore(tmp_path / "c")
        after = other_algorithm.workers.local_worker().get_weights()
        for policy_id, weights in before.items():
            assert all(np.array_equal(weights[n], after[policy_id][n]) for n in weights)


def test_evaluation_plays_all_policies():
    with three_policy_config().build() as algorithm:
        result = algorithm.evaluate(episodes=3, num_envs=2)
        assert (result["episodes"], result["episode_reward_mean"]) == (3, 12.0)
        assert algorithm.compute_single_action(np.zeros(2, np.float32), policy_id="b") in range(3)
        with pytest.raises(ConfigError, match="no policy 'd'"):
            algorithm.compute_single_action(np.zeros(2, np.float32), policy_id="d")
        names_them = r"^policy_id: there are the policies \['a', 'b', 'c'\]: name one, such as poli"
        for act in (algorithm.compute_single_action, algorithm.predict):
            with pytest.raises(ConfigError, match=names_them):
                act(np.zeros(2, np.float32))
        with pytest.raises(ConfigError, match=names_them):
            algorithm.get_policy()


def test_default_policy_acts_if_no_policy_is_named():
    config = three_policy_config()
    policies = {"a": config.policies["a"], "default_policy": config.policies["b"]}
    config.multi_agent(
        policies=policies,
        policy_mapping_fn=lambda agent_id, **kwargs: "default_policy",
        policies_to_train=None,
    )
    with config.build() as algorithm:
        assert algorithm.get_policy() is algorithm.get_policy("default_policy")


def test_checkpoint_restores_all_policies(tmp_path):
    with three_policy_config().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        weights = algorithm.workers.local_worker().get_weights()
    with three_policy_config().build() as other_algorithm:
        other_algorithm.restore(tmp_path / "c")
        restored = other_algorithm.workers.local_worker().get_weights()
        for policy_id, arrays in weights.items():
            for name, array in arrays.items():
                assert np.array_equal(restored[policy_id][name], array)
        assert other_algorithm.train()["training_iteration"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies_to_train": ["x"], "policies": {"a": None}}, "no policy 'x'"),
        ({"policies_to_train": "a", "policies": {"a": None}}, "collection of policy ids"),
        ({"policies": {"a": None, "b": None}}, "policy_mapping_fn"),
        ({"policies": 5}, "a mapping"),
    ],
)
def test_contradictory_settings_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(env="CartPole-v1").multi_agent(**settings).build()


def assigned(multiagent):
    config = PPOConfig(env="CartPole-v1")
    config.multiagent = multiagent
    return config


@pytest.mark.parametrize(
    "config_with",
    [
        lambda multiagent: PPOConfig(multiagent=multiagent),
        lambda multiagent: PPOConfig().updated(multiagent=multiagent),
        lambda multiagent: PPOConfig().multi_agent(multiagent=multiagent),
        lambda multiagent: PPO(PPOConfig(env="CartPole-v1"), multiagent=multiagent).config,
        assigned,
    ],
)
def test_multiagent_settings_are_accepted_as_a_dict(config_with):
    config = config_with(
        {
            "policies": {"a": (None, None, None, {"lr": 0.5})},
            "policy_mapping_fn": lambda agent_id: "a",
            "count_steps_by": "agent_steps",
        }
    )
    assert config.count_steps_by == "agent_steps"
    assert {"policies", "count_steps_by"} <= config.explicit_settings().keys()
    assert config.for_policy("a").lr == 0.5
    with pytest.raises(ConfigError, match="no policy 'b'"):
        config.for_policy("b")


def test_settings_may_not_be_given_twice_by_multiagent():
    with pytest.raises(ConfigError, match="policies is given twice, also in multiagent"):
        PPOConfig(policies=["a"], multiagent={"policies": ["b"]})


# -- PettingZoo ------------------------------------------------------------------------------------


class RandomLegalMoves(Policy):
    """Plays a random move that the action mask allows."""

    def compute_actions(self, obs_batch, explore=True):
        masks = obs_batch["action_mask"]
        draws = self.rng.random(masks.shape) * masks
        return draws.argmax(1), [], {}


def test_pettingzoo_tictactoe_plays_legal_moves():
    require_extra("marl")
    from pettingzoo import classic

    worker = RolloutWorker(
        lambda context: PettingZooEnv(classic.tictactoe_v3.env()),
        {"x": RandomLegalMoves, "o": RandomLegalMoves},
        {
            "policy_mapping_fn": lambda agent_id: {"player_1": "x", "player_2": "o"}[agent_id],
            "rollout_fragment_length": 200,
            "seed": 3,
        },
    )
    batch = worker.sample()
    assert batch.env_steps() == 200
    assert batch["x"]["obs"]["observation"].shape[1:] == (3, 3, 2)
    episodes = worker.get_metrics()
    assert len(episodes) >= 20
    for episode in episodes:
        assert 5 <= episode.episode_length <= 9
        assert episode.episode_return == 0  # zero-sum
        assert sorted(value for _, _, value in episode.agent_returns) in ([-1, 1], [0, 0])
    for rows in batch.policy_batches.values():
        # every move is legal, and only final rows have rewards
        moves = rows["obs"]["action_mask"][np.arange(rows.count), rows["actions"]]
        assert moves.all()
        assert not rows["rewards"][~rows["dones"]].any()
    wins = [rows["rewards"].sum() for rows in batch.policy_batches.values()]
    assert sum(wins) == pytest.approx(0, abs=1)


def test_parallel_pettingzoo_env_truncates_all_agents():
    require_extra("marl")
    from pettingzoo import classic

    worker = RolloutWorker(
        lambda context: ParallelPettingZooEnv(classic.rps_v2.parallel_env(max_cycles=10)),
        {"p": PPOTorchPolicy},
        {"rollout_fragment_length": 40, "seed": 1},
    )
    batch = worker.sample()
    assert (batch.env_steps(), batch.agent_steps()) == (40, 80)
    assert len(worker.get_metrics()) == 4
    assert batch["p"]["truncateds"].sum() == 8
    assert not batch["p"]["terminateds"].any()


@pytest.mark.parametrize("form", ["function", "creator", "class", "instance"])
@pytest.mark.parametrize("parallel", [False, True])
def test_pettingzoo_environments_are_wrapped(form, parallel):
    require_extra("marl")
    from pettingzoo.classic.rps.rps import env as turns
    from pettingzoo.classic.rps.rps import parallel_env, raw_env

    function = parallel_env if parallel else turns
    forms = {
        "function": function,
        "creator": lambda context: function(),
        "class": raw_env,
        "instance": function(),
    }
    created = []

    class RecordsEnvs(DefaultCallbacks):
        def on_sub_environment_created(self, *, sub_environment, **kwargs):
            created.append(sub_environment)

    settings = {"rollout_fragment_length": 40, "seed": 1, "callbacks_class": RecordsEnvs}
    worker = RolloutWorker(forms[form], {"p": PPOTorchPolicy}, settings)
    assert worker.sample().env_steps() == 40
    assert worker.possible_agents == ["player_0", "player_1"]
    wrapper = ParallelPettingZooEnv if parallel and form != "class" else PettingZooEnv
    assert type(created[0]) is wrapper


def test_pettingzoo_environment_of_the_other_kind_names_its_wrapper():
    class Turns:
        possible_agents = ["a"]

        def agent_iter(self): ...

    class Parallel:
        possible_agents = ["a"]

    with pytest.raises(ConfigError, match=r"is turn-based \(AEC\): wrap it in a PettingZooEnv"):
        ParallelPettingZooEnv(Turns())
    with pytest.raises(ConfigError, match=r"is parallel: wrap it in a ParallelPettingZooEnv"):
        PettingZooEnv(Parallel())
    assert ParallelPettingZooEnv(Parallel()).possible_agents == ["a"]
    assert PettingZooEnv(Turns()).possible_agents == ["a"]


def test_pettingzoo_module_is_rejected_with_its_functions():
    require_extra("marl")
    from pettingzoo.classic.rps import rps

    with pytest.raises(ConfigError, match="parallel_env, or env for turns"):
        PPOConfig(env=rps).check()


def test_pettingzoo_env_without_agents_raises():
    with pytest.raises(ConfigError, match="possible_agents"):
        ParallelPettingZooEnv(object())


class ReplaysDifferently(MultiAgentEnv):
    """Two agents take turns; the observation of agent 1 is another one in each environment."""

    observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = [0, 1]

    def __init__(self, number):
        self.number = number

    def _turn(self):
        agent = self.steps % 2
        value = self.number if agent else 0
        return {agent: np.array([agent, value], np.float32)}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._turn(), {}

    def step(self, action_dict):
        self.steps += 1
        flags = {"__all__": self.steps == 100}
        return self._turn(), {}, flags, {"__all__": False}, {}


def test_replayed_episode_must_have_the_observations_of_all_agents():
    numbers = iter([1, 1, 2])

    def make_worker():
        return RolloutWorker(
            lambda context: ReplaysDifferently(next(numbers)),
            {"p": Idle},
            {"rollout_fragment_length": 5, "policy_mapping_fn": lambda agent_id: "p"},
        )

    first, same, other = make_worker(), make_worker(), make_worker()
    for _ in range(2):
        first.sample()  # agent 0 acts next
    state = first.sampling_state_dict()
    numbers = iter([1, 2])  # restoring creates the environments again
    assert same.load_sampling_state_dict(state) == 0
    assert other.load_sampling_state_dict(state) == 1


def test_final_observation_of_another_dtype_raises():
    class EndsWrongly(Script):
        def observation(self, agent):
            observation = super().observation(agent)
            return observation.astype("U1") if self.now == 2 else observation

    script = EndsWrongly([0], {0: REWARD}, {0: REWARD})
    with pytest.raises(ConfigError, match="dtype <U1, not") as raised:
        play(script).sample()
    notes = raised.value.__notes__
    assert notes[:2] == ["returned for agent 0", "raised by sub-environment 0"]


@pytest.mark.parametrize("fragment", [3, 5])
def test_restored_infos_belong_to_their_rows_if_views_read_more_rows(fragment):
    def make_worker():
        script = Script([0, 1], *[{0: REWARD, 1: REWARD}] * 20)
        return play(script, fragment, collect_infos=True)

    first, resumed = make_worker(), make_worker()
    first.sample()
    view = ViewRequirement("obs", shift="-4:0")
    resumed.policy_map["p"].view_requirements["history"] = view
    assert resumed.load_sampling_state_dict(first.sampling_state_dict()) == 0
    for _ in range(2):
        rows, expected = resumed.sample()["p"], first.sample()["p"]
        assert rows["t"].tolist() == expected["t"].tolist()
        assert rows["infos"].tolist() == expected["infos"].tolist()
        assert [info["step"] for info in rows["infos"]] == (rows["t"] + 1).tolist()


@pytest.mark.parametrize("method", ["reset", "step"])
def test_observation_of_all_is_rejected(method):
    class Wrong(MultiAgentEnv):
        possible_agents = ["a"]
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def observe(self, is_wrong):
            observations = {"a": np.zeros(1, np.float32)}
            return {**observations, "__all__": observations["a"]} if is_wrong else observations

        def reset(self, *, seed=None, options=None):
            return self.observe(method == "reset"), {}

        def step(self, action_dict):
            flags = {"__all__": False}
            return self.observe(method == "step"), {"a": 0.0}, flags, flags, {}

    with pytest.raises(ConfigError, match=rf'{method}\(\) returned an observation of "__all__"'):
        RolloutWorker(lambda context: Wrong(), PPOTorchPolicy).sample()


def test_environment_draws_from_the_generator_of_its_base_class():
    class Draws(MultiAgentEnv):
        possible_agents = ["a"]
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"a": self.np_random.random(1, np.float32)}, {}

    first, second = Draws(), Draws()
    assert first.reset(seed=3) == second.reset(seed=3)
    assert first.reset() == second.reset()
    assert first.reset(seed=4) != second.reset(seed=5)
    with pytest.raises(NotImplementedError, match=r"MultiAgentEnv has no reset\(\)"):
        MultiAgentEnv().reset(seed=1)


class WithoutPossibleAgents(MultiAgentEnv):
    observation_spaces = {"a": gym.spaces.Box(-1, 1, (1,))}
    action_spaces = {"a": gym.spaces.Discrete(2)}

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(1, np.float32)}, "no dict"

    def step(self, action_dict):
        return (
            {"a": np.zeros(1, np.float32)},
            {"a": 1.0},
            {"__all__": False},
            {"__all__": False},
            {},
        )


class DifferentAgents(WithoutPossibleAgents):
    possible_agents = ["a", "b"]
    observation_spaces = {"a": gym.spaces.Box(-1, 1, (1,)), "b": gym.spaces.Box(-1, 1, (2,))}
    action_spaces = {"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(2)}


def test_missing_possible_agents_are_named():
    with pytest.raises(ConfigError, match="WithoutPossibleAgents has no possible_agents: set it"):
        RolloutWorker(lambda c: WithoutPossibleAgents(), Idle, {})


def test_guessed_spaces_are_reported(caplog):
    def mapping(agent_id, episode, **kwargs):
        return "p" if episode.episode_id >= 0 else "q"

    config = {"policies": {"p", "q"}, "policy_mapping_fn": mapping, "rollout_fragment_length": 3}
    worker = RolloutWorker(lambda c: DifferentAgents(), Idle, config)
    assert "the policy 'q' has the spaces of the agent 'a'" in caplog.text
    assert worker.sample().count == 3  # infos of reset() that are no dict are ignored


def test_last_observations_are_copied_before_another_agent_is_observed():
    creator = make_multi_agent(lambda context: CountEnv(length=3))
    config = {"rollout_fragment_length": 6, "env_config": {"num_agents": 2, "episode_steps": 9}}
    worker = RolloutWorker(creator, Idle, config)
    for rows in worker.sample()["default_policy"].split_by_episode():
        ends = rows["terminateds"] | rows["truncateds"]
        assert ends.any()
        assert (rows["new_obs"][:, 1] == rows["obs"][:, 1] + 1).all()


def test_ends_of_unknown_agents_are_a_warning(caplog):
    class Env(MultiAgentEnv):
        possible_agents = ["a", "b"]
        observation_space, action_space = CountEnv.observation_space, CountEnv.action_space

        def reset(self, *, seed=None, options=None):
            return {"a": np.zeros(2, np.float32)}, {}

        def step(self, action_dict):
            ends = {"A": True, "a": False, "b": False, "__all__": False}
            return {"a": np.zeros(2, np.float32)}, {"a": 1.0}, ends, {"__all__": False}, {}

    RolloutWorker(lambda context: Env(), Idle, {"rollout_fragment_length": 5}).sample()
    (message,) = caplog.messages
    assert "an end of agent 'A', which had no observation in the episode" in message


@pytest.mark.parametrize("agents", [["a"], ["a", "b"]])
def test_infos_of_agents_are_dicts(agents):
    class Env(MultiAgentEnv):
        possible_agents = ["a", "b"]
        observation_space, action_space = CountEnv.observation_space, CountEnv.action_space

        def reset(self, *, seed=None, options=None):
            return dict.fromkeys("ab", np.zeros(2, np.float32)), {}

        def step(self, action_dict):
            obs = dict.fromkeys(agents, np.zeros(2, np.float32))
            ends = {"__all__": False}
            return obs, dict.fromkeys(agents, 1.0), ends, dict(ends), {"a": [1]}

    worker = RolloutWorker(lambda context: Env(), Idle, {"rollout_fragment_length": 5})
    with pytest.raises(
        ConfigError, match=r"sub-environment 0 returned the info \[1\] for agent 'a'"
    ):
        worker.sample()
