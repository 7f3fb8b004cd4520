"""Several agents: who comes and goes, who acts when, whose reward it is, and which policy."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.data import MultiAgentBatch
from flowrl.data.checkpoint import CheckpointError
from flowrl.envs import MultiAgentEnv, ParallelPettingZooEnv, PettingZooEnv
from flowrl.policies import ConfigError, Policy, PolicySpec, ViewRequirement
from flowrl.sampling import RolloutWorker, WorkerSet

from .fakes import Idle, ObservedValue


class Script(MultiAgentEnv):
    """Plays a script: one dict per step, agent -> (reward, terminated, truncated) for those who are
    observed; "rewards" are for others. An observation is (agent number, env step)."""

    observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = [0, 1, 2, 3]

    def __init__(self, first, *steps, over=None, truncated=False):
        self.first, self.steps, self.over, self.truncated = first, steps, over, truncated
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
        seen = {agent: v for agent, v in script.items() if agent not in ("rewards", "ends")}
        last = self.now == len(self.steps)
        return (
            {agent: self.observation(agent) for agent in seen},
            {agent: v[0] for agent, v in seen.items()} | script.get("rewards", {}),
            {a: v[1] for a, v in seen.items()}
            | script.get("ends", {})
            | {"__all__": last and not self.truncated},
            {a: v[2] for a, v in seen.items()} | {"__all__": last and self.truncated},
            {agent: {"step": self.now} for agent in seen},
        )


def play(script, fragment=None, policies=("p",), mapping=None, **config):
    """One worker over a scripted environment."""
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
    own = rows.take_rows(np.flatnonzero(rows["obs"][:, 0] == agent))
    names = ("t", "rewards", "terminateds", "truncateds")
    return list(zip(*(own[name].tolist() for name in names), strict=True))


ON = (1.0, False, False)


def test_agents_that_always_act():
    script = Script([0, 1], {0: ON, 1: ON}, {0: ON, 1: ON})
    batch = play(script).sample()
    assert isinstance(batch, MultiAgentBatch)
    assert (batch.env_steps(), batch.agent_steps()) == (2, 4)
    assert script.acted == [[0, 1], [0, 1]]
    for agent in (0, 1):
        assert rows_of(batch, agent) == [(0, 1.0, False, False), (1, 1.0, True, False)]


def test_turns_and_rewards_between_them():
    # agent 0 acts at steps 0 and 2, agent 1 at 1; 0's reward comes in three parts
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
    # nobody was observed at the end: the last observation stands for the final one
    last = rows["new_obs"][rows["terminateds"]].tolist()
    assert sorted(last) == [[0.0, 2.0], [1.0, 3.0]]
    assert (batch.env_steps(), batch.agent_steps()) == (4, 4)


def test_an_agent_that_ends_early_and_one_that_joins_late():
    script = Script(
        [0, 1],
        {0: (1.0, True, False), 1: ON},
        {1: ON, 2: (9.0, False, False)},
        {1: ON, 2: ON},
    )
    worker = play(script)
    batch = worker.sample()
    assert script.acted == [[0, 1], [1], [1, 2]]
    assert rows_of(batch, 0) == [(0, 1.0, True, False)]
    assert rows_of(batch, 2) == [(2, 1.0, True, False)]  # the 9.0 came before it had acted
    assert batch["p"]["agent_index"].tolist() == [0, 1, 1, 1, 2]
    (episode,) = worker.get_metrics()
    assert episode.agent_returns == [("0", "p", 1.0), ("1", "p", 3.0), ("2", "p", 1.0)]
    assert episode.episode_return == 5.0


def test_an_agent_that_comes_back_begins_anew():
    script = Script([0, 1], {0: (1.0, True, False), 1: ON}, {0: ON, 1: ON}, {0: ON, 1: ON})
    batch = play(script).sample()
    assert rows_of(batch, 0) == [(0, 1.0, True, False), (2, 1.0, True, False)]
    own = batch["p"].take_rows(np.flatnonzero(batch["p"]["obs"][:, 0] == 0))
    assert len(set(own["unroll_id"])) == 2
    assert len(set(own["eps_id"])) == 1


def test_one_whose_end_is_said_without_an_observation():
    script = Script([0, 1], {1: ON, "rewards": {0: 4.0}, "ends": {0: True}}, {1: ON}, {1: ON})
    batch = play(script).sample()
    assert rows_of(batch, 0) == [(0, 4.0, True, False)]
    assert script.acted == [[0, 1], [1], [1]]


def test_one_that_is_done_when_it_first_appears(caplog):
    script = Script([0], {0: ON, 1: (3.0, True, False)}, {0: ON})
    batch = play(script).sample()
    assert rows_of(batch, 1) == []
    assert "has not been observed" in caplog.text


def test_a_limit_truncates_everybody():
    script = Script([0, 1], {0: ON, 1: ON}, {0: ON, "rewards": {1: 7.0}}, truncated=True)
    batch = play(script).sample()
    assert rows_of(batch, 0)[-1] == (1, 1.0, False, True)
    assert rows_of(batch, 1)[-1] == (1, 7.0, False, True)
    values = batch["p"]["next_values"][batch["p"]["truncateds"]]
    assert (values != 0).all()


@pytest.mark.parametrize("soft", [False, True])
def test_a_horizon_keeps_every_reward(soft):
    steps = [{0: ON, "rewards": {1: 7.0}}] * 5
    script = Script([0, 1], *steps)
    worker = play(script, 4, horizon=2, soft_horizon=soft)
    batch = worker.sample()
    assert batch.env_steps() == 4
    assert sum(r for _, r, _, _ in rows_of(batch, 0)) == 4
    if soft:
        assert not (batch["p"]["truncateds"] | batch["p"]["terminateds"]).any()
        assert rows_of(batch, 1) == []  # it still waits for an observation
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
@settings(max_examples=100, deadline=None)
def test_any_schedule_gives_consistent_rows(steps, first, fragment):
    script = Script(sorted(first), *steps)
    worker = play(script, fragment)
    batches = [worker.sample() for _ in range(6)]
    for batch in batches:
        assert batch.env_steps() == fragment
        if "p" not in batch:
            continue
        for row in batch["p"].rows():
            agent, seen = row["obs"]
            assert seen <= row["t"]
            assert row["new_obs"][0] == agent
            assert row["new_obs"][1] in (row["t"] + 1, seen)  # or its end was not observed
    # an agent acts in a step if and only if it was observed before it and had not ended
    for acted, before in zip(script.acted[1:], script.acted, strict=False):
        assert len(set(acted)) == len(acted), before
    total = sum(batch.agent_steps() for batch in batches)
    begun = sum(len(acted) for acted in script.acted)
    assert 0 <= begun - total <= 4  # the rest wait for what comes of it


# -- policies -------------------------------------------------------------------------------------


class Arena(MultiAgentEnv):
    """Agents with spaces of their own, all of them acting for four steps."""

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
        over = self.now == 4
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        return self.observe(), rewards, {"__all__": over}, {"__all__": False}, {}


def test_policies_take_their_agents_spaces():
    worker = RolloutWorker(
        lambda context: Arena(),
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
    # the same class and seed, but networks of their own
    same = [RolloutWorker("CartPole-v1", dict.fromkeys("xy", PPOTorchPolicy),
                          {"seed": 1, "policy_mapping_fn": lambda a: "x"}).policy_map]  # fmt: skip
    weights = [p.get_weights()["hidden.0.weight"] for p in same[0].values()]
    assert not np.array_equal(*weights)


def test_several_agents_are_one_call():
    calls = []

    class Counting(ObservedValue):
        def compute_actions(self, obs_batch, explore=True):
            calls.append(len(obs_batch))
            return super().compute_actions(obs_batch, explore)

    script = [Script([0, 1, 2], {0: ON, 1: ON, 2: ON}, {0: ON, 1: ON, 2: ON}) for _ in range(2)]
    RolloutWorker(
        lambda context: script[context.vector_index],
        {"p": Counting},
        {"num_envs_per_worker": 2, "rollout_fragment_length": 2},
    ).sample()
    assert calls == [6, 6]


def test_a_mapping_holds_for_the_whole_episode():
    asked = []

    def mapping(agent_id, episode, worker, **kwargs):
        asked.append((agent_id, episode is not None))
        return "pq"[len(asked) % 2]

    script = Script([0], *([{0: ON}] * 4))
    worker = play(script, 8, policies=("p", "q"), mapping=mapping)
    asked.clear()
    batch = worker.sample()
    assert asked == [(0, True)] * 3  # two whole episodes, and one that has begun
    assert {pid: rows.count for pid, rows in batch.policy_batches.items()} == {"p": 4, "q": 4}


def test_other_agents_batches_reach_postprocessing():
    told = []

    class Curious(ObservedValue):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            mine = int(sample_batch["obs"][0, 0])
            others = {
                agent: rows["rewards"].sum() for agent, (_, rows) in other_agent_batches.items()
            }
            told.append((mine, others, episode.length))
            return sample_batch.with_columns(team=np.full(sample_batch.count, sum(others.values())))

    script = Script([0, 1, 2], *([{0: ON, 1: (2.0, False, False), 2: ON}] * 3))
    worker = RolloutWorker(
        lambda context: script,
        {"p": Curious, "q": ObservedValue},
        {
            "rollout_fragment_length": 3,
            "policy_mapping_fn": lambda agent_id: "q" if agent_id == 2 else "p",
        },
    )
    batch = worker.sample()
    assert told == [(0, {1: 6.0, 2: 3.0}, 3), (1, {0: 3.0, 2: 3.0}, 3)]
    assert batch["p"]["team"].tolist() == [9.0] * 3 + [6.0] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_mapping_fn": lambda agent_id: "nobody"}, "maps agent 'a' to 'nobody'"),
        ({}, "policy_mapping_fn"),
        ({"policy_mapping_fn": "p"}, "must be a function"),
        ({"multiagent": {"policy_maping_fn": len}}, "Did you mean 'policy_mapping_fn'"),
    ],
)
def test_what_cannot_be_mapped_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(
            lambda context: Arena(), {"p": ObservedValue, "q": ObservedValue}, settings
        ).sample()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: (*given[:2], {}, *given[3:]), r'terminateds\["__all__"\]'),
        (lambda given: (*given[:3], {}, *given[4:]), r'truncateds\["__all__"\]'),
        (lambda given: ([1, 2], *given[1:]), "observations as a dict by agent id"),
        (lambda given: (given[0], 1.0, *given[2:]), "rewards as a dict by agent id"),
        (lambda given: (given[0], {"a": "1"}, *given[2:]), "reward is one number"),
        (lambda given: ({"a": np.zeros(7, np.float32)}, *given[1:]), "shape"),
        (lambda given: ({"x": np.zeros(1, np.float32)}, *given[1:]), "space of agent 'x'"),
    ],
)
def test_environments_that_speak_wrongly_are_named(change, message):
    class Odd(Arena):
        def step(self, action_dict):
            return change(super().step(action_dict))

    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda context: Odd("a"), {"p": Idle}, {}).sample()


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
def test_wrong_policies_are_refused(policies, message):
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda context: Arena("a"), policies, {})


def test_an_agent_whose_policy_has_another_space():
    worker = RolloutWorker(
        lambda context: Arena("ab"), {"p": ObservedValue}, {"rollout_fragment_length": 4}
    )
    with pytest.raises(ConfigError, match=r"agent 'b' is mapped to policy 'p', whose observation"):
        worker.sample()


# -- views of other agents ------------------------------------------------------------------------


class Listening(Idle):
    """Keeps what it is given to act on; acts by step, so that actions differ."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.seen += [
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
@settings(max_examples=80, deadline=None)
def test_views_of_other_agents_are_the_same_at_acting_and_training(steps, fragment, shift):
    script = Script([0, 1, 2], *steps)
    worker = RolloutWorker(
        lambda context: script, {"p": Listening}, {"rollout_fragment_length": fragment}
    )
    policy = worker.policy_map["p"]
    policy.view_requirements["told"] = ViewRequirement("obs", shift=shift, agents=[1, 2])
    policy.view_requirements["did"] = ViewRequirement("actions", shift=-1, agents=[0, 1, 2])
    batches = [worker.sample() for _ in range(6)]
    acted = {tuple(seen["obs"]): [] for seen in policy.seen}
    for seen in policy.seen:
        acted[tuple(seen["obs"])].append(seen)
    for batch in batches:
        if "p" not in batch:
            continue
        for row in batch["p"].rows():
            candidates = acted[tuple(row["obs"])]
            names = ("told", "told_mask", "did", "did_mask")
            assert any(all(np.array_equal(c[n], row[n]) for n in names) for c in candidates), row
            if shift == 0:
                for i, agent in enumerate((1, 2)):
                    if row["told_mask"][i]:
                        assert row["told"][i].tolist() == [agent, row["obs"][1]]
                    else:
                        assert not row["told"][i].any()


def test_all_others():
    script = Script([0, 1], *([{0: ON, 1: ON}] * 2))
    worker = play(script)
    worker.policy_map["p"].view_requirements["others"] = ViewRequirement("obs", agents="others")
    rows = worker.sample()["p"]
    assert rows["others"].shape == (4, 3, 2)
    assert rows["others_mask"].tolist() == [[True, False, False]] * 4
    assert rows["others"][:, 0, 0].tolist() == [1, 1, 0, 0]


# -- in whole runs ---------------------------------------------------------------------------------


def test_workers_on_actors(ray_session):
    workers = WorkerSet(
        lambda context: Arena(),
        None,
        {
            "policies": {
                "a": PolicySpec(PPOTorchPolicy),
                "b": PolicySpec(PPOTorchPolicy),
                "c": PolicySpec(Heuristic),
            },
            "policy_mapping_fn": lambda agent_id, **kwargs: agent_id,
            "rollout_fragment_length": 8,
            "num_workers": 1,
        },
    )
    batches = next(iter(workers.parallel_iterator().batch_across_shards().take(1)))
    assert [batch.agent_steps() for batch in batches] == [24]
    workers.stop()


def config_for_three():
    return (
        PPOConfig(seed=1, train_batch_size=200, sgd_minibatch_size=32, num_sgd_iter=2)
        .environment(env=lambda context: Arena())
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


def test_a_run_of_several_policies():
    config = config_for_three()
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
        lambda agent_id, worker, episode: aid_of(agent_id, worker, episode),
        lambda agent_id, *, episode: agent_id if episode is None else str(agent_id),
        lambda agent_id, **kwargs: agent_id if set(kwargs) == {"episode", "worker"} else "",
        str,
        {agent: agent for agent in "abc"}.__getitem__,
    ],
)
def test_mappings_of_any_signature(mapping):
    w = RolloutWorker(
        lambda context: Arena(), dict.fromkeys("abc", Idle), {"policy_mapping_fn": mapping}
    )
    assert set(w.sample().policy_batches) == set("abc")


def aid_of(agent_id, worker, episode):
    assert isinstance(worker, RolloutWorker)
    assert episode is None or episode.worker is worker
    return agent_id


def test_a_mapping_that_raises_is_named():
    def broken(agent_id):
        raise KeyError(agent_id)

    w = RolloutWorker(
        lambda context: Arena(), dict.fromkeys("ab", Idle), {"policy_mapping_fn": broken}
    )
    with pytest.raises(KeyError) as caught:
        w.sample()
    assert "policy_mapping_fn for agent 'a'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PolicySpec(int), "policy_class of 'p'"),
        (PolicySpec("PPO"), "policy_class of 'p'"),
        (PolicySpec(Idle, config=5), "config of 'p' is a mapping"),
        (PolicySpec(Idle, config={"num_workers": 2}), "'num_workers' of 'p' is the run's"),
        (PolicySpec(Idle, config={"gama": 0.5}), "gama"),
    ],
)
def test_wrong_specs_are_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(lambda context: Arena("a"), {"p": spec}, {})


class Apart(MultiAgentEnv):
    """Two agents; what one should do the other should not."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = ["zero", "one"]

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.observe(), {}

    def observe(self):
        # the second is seen every fifth step only
        there = self.possible_agents if self.n % 5 == 0 else ["zero"]
        return {agent: np.zeros(1, np.float32) for agent in there}

    def step(self, action_dict):
        self.n += 1
        rewards = {a: float(self.possible_agents[x] == a) for a, x in action_dict.items()}
        return self.observe(), rewards, {"__all__": self.n == 20}, {"__all__": False}, {}


def test_each_policy_learns_and_plays_its_own():
    config = (
        PPOConfig(env=lambda context: Apart(), train_batch_size=400, seed=1, lr=3e-3)
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


class Heuristic(Policy):
    """Does not learn."""

    def compute_actions(self, obs_batch, explore=True):
        return np.ones(len(obs_batch), np.int64), [], {}


def test_a_policy_that_does_not_learn(tmp_path):
    config = config_for_three()
    config.multi_agent(policies={**config.policies, "c": PolicySpec(Heuristic)})
    with config.build() as algorithm:
        assert set(algorithm.train()["info"]["learner"]) == {"a", "b"}
        algorithm.save(tmp_path / "c")
        algorithm.restore(tmp_path / "c")
        with pytest.raises(NotImplementedError, match="Heuristic has no learn_on_batch"):
            algorithm.get_policy("c").learn_on_batch(None)
        with pytest.raises(ValueError, match="has no weights"):
            algorithm.get_policy("c").set_weights({"w": np.zeros(1)})


def test_a_checkpoint_of_other_policies_changes_nothing(tmp_path):
    with config_for_three().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    other = config_for_three()
    other.multi_agent(
        policies={**other.policies, "c": PolicySpec(config={"model": {"fcnet_hiddens": [8]}})}
    )
    with other.build() as again:
        before = again.workers.local_worker().get_weights()
        with pytest.raises(CheckpointError, match="does not fit"):
            again.restore(tmp_path / "c")
        after = again.workers.local_worker().get_weights()
        for policy_id, own in before.items():
            assert all(np.array_equal(own[name], after[policy_id][name]) for name in own)


def test_an_evaluation_of_several_policies():
    with config_for_three().build() as algorithm:
        told = algorithm.evaluate(episodes=3, num_envs=2)
        assert (told["episodes"], told["episode_reward_mean"]) == (3, 12.0)
        assert algorithm.compute_single_action(np.zeros(2, np.float32), policy_id="b") in range(3)
        with pytest.raises(ConfigError, match="no policy 'd'"):
            algorithm.compute_single_action(np.zeros(2, np.float32), policy_id="d")


def test_a_checkpoint_of_several_policies(tmp_path):
    with config_for_three().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        weights = algorithm.workers.local_worker().get_weights()
    with config_for_three().build() as again:
        again.restore(tmp_path / "c")
        restored = again.workers.local_worker().get_weights()
        for policy_id, own in weights.items():
            for name, array in own.items():
                assert np.array_equal(restored[policy_id][name], array)
        assert again.train()["training_iteration"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies_to_train": ["x"], "policies": {"a": None}}, "no policy 'x'"),
        ({"policies_to_train": "a", "policies": {"a": None}}, "collection of policy ids"),
        ({"policies": {"a": None, "b": None}}, "policy_mapping_fn"),
        ({"policies": 5}, "a mapping"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(env="CartPole-v1").multi_agent(**settings).build()


def test_the_mapping_of_plain_dicts():
    config = PPOConfig(
        multiagent={
            "policies": {"a": (None, None, None, {"lr": 0.5})},
            "policy_mapping_fn": lambda agent_id: "a",
            "count_steps_by": "agent_steps",
        }
    )
    assert config.count_steps_by == "agent_steps"
    assert config.for_policy("a").lr == 0.5
    with pytest.raises(ConfigError, match="no policy 'b'"):
        config.for_policy("b")


# -- PettingZoo ------------------------------------------------------------------------------------


class Legal(Policy):
    """Plays any move that the mask allows."""

    def compute_actions(self, obs_batch, explore=True):
        masks = obs_batch["action_mask"]
        draws = self.rng.random(masks.shape) * masks
        return draws.argmax(1), [], {}


def test_tictactoe():
    classic = pytest.importorskip("pettingzoo.classic")
    worker = RolloutWorker(
        lambda context: PettingZooEnv(classic.tictactoe_v3.env()),
        {"x": Legal, "o": Legal},
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
        assert episode.episode_return == 0  # what one wins the other loses
        assert sorted(value for _, _, value in episode.agent_returns) in ([-1, 1], [0, 0])
    for rows in batch.policy_batches.values():
        # every move was legal, and rewards come at the ends alone
        moves = rows["obs"]["action_mask"][np.arange(rows.count), rows["actions"]]
        assert moves.all()
        assert not rows["rewards"][~rows["dones"]].any()
    wins = [rows["rewards"].sum() for rows in batch.policy_batches.values()]
    assert sum(wins) == pytest.approx(0, abs=1)


def test_a_parallel_game():
    classic = pytest.importorskip("pettingzoo.classic")
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


def test_a_pettingzoo_env_without_agents_is_refused():
    with pytest.raises(ConfigError, match="possible_agents"):
        ParallelPettingZooEnv(object())
