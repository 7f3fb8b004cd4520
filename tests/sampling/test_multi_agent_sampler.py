"""Sampling several agents in columns returns the same as sampling them row by row."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.envs import MultiAgentEnv
from flowrl.policies import ViewRequirement
from flowrl.sampling import RolloutWorker, SimpleListCollector
from flowrl.sampling.callbacks import DefaultCallbacks

from .test_column_sampler import ATTENTION, RECURRENT, SMALL, assert_same


class Crowd(MultiAgentEnv):
    """Agents join, leave, return and take turns at random; an observation is (episode, agent, step,
    sum of the actions)."""

    possible_agents = list(range(5))
    observation_space = gym.spaces.Box(-1.0, 1e6, (4,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, seed, kind="random", fail_at=None):
        self.np_random, self.kind, self.fail_at = np.random.default_rng(seed), kind, fail_at
        self.episode, self.total = -1, 0

    def get_state(self):
        return {"episode": self.episode, "total": self.total, "sum": self.sum, "steps": self.steps,
                "length": self.length, "alive": list(self.alive)}  # fmt: skip

    def set_state(self, state):
        vars(self).update(state)

    def observe(self, agents):
        return {a: np.array([self.episode, a, self.steps, self.sum], np.float32) for a in agents}

    def some(self, agents, share):
        return [agent for agent in agents if self.np_random.random() < share]

    def reset(self, *, seed=None, options=None):
        self.episode, self.steps, self.sum = self.episode + 1, 0, 0
        self.length = int(self.np_random.integers(1, 8))
        self.alive = self.some(self.possible_agents, 0.6)
        if self.kind == "always" or not self.alive:
            self.alive = [0, 1, 2]
        return self.observe(self.alive), {agent: {"start": agent} for agent in self.alive[:1]}

    def step(self, action_dict):
        self.steps, self.total = self.steps + 1, self.total + 1
        if self.total == self.fail_at:
            raise OSError("the arena failed")
        self.sum += sum(int(action) * (agent + 1) for agent, action in action_dict.items())
        observed, ends, cuts = self.alive, {}, {}
        if self.kind == "random":
            observed = self.some(self.alive, 0.7)
            leaving = self.some(self.alive, 0.2)
            for agent in leaving:
                (ends if self.np_random.random() < 0.5 else cuts)[agent] = True
            joining = self.some(set(self.possible_agents) - set(self.alive), 0.2)
            self.alive = sorted((set(self.alive) | set(joining)) - set(leaving))
            observed = observed + joining
        elif self.kind == "turns":
            observed = [self.alive[self.steps % len(self.alive)]]
        over, cut = self.steps >= self.length, self.np_random.random() < 0.1
        rewards = {agent: float(self.steps + agent) for agent in {*self.alive, *observed, *ends}}
        infos = {agent: {"step": self.steps} for agent in observed[:2]}
        ends, cuts = {**ends, "__all__": over}, {**cuts, "__all__": cut}
        return self.observe(observed), rewards, ends, cuts, infos


def policy_of(agent, episode, **kwargs):
    return "pq"[(agent + episode.episode_id) % 2]


def pair(
    kind="random",
    fragment=7,
    envs=2,
    seed=0,
    fail_at=None,
    views=(),
    policy_class=PPOTorchPolicy,
    **config,
):
    """Return a worker that samples in columns and one that samples rows, otherwise equal."""
    workers = []
    for collector in (None, SimpleListCollector):
        created = []

        def make(context, created=created):
            created.append(context.vector_index)
            again = created.count(context.vector_index) > 1
            fails = fail_at if context.vector_index == 0 and not again else None
            return Crowd([seed, context.vector_index, again], kind, fails)

        worker = RolloutWorker(
            make,
            {"p": policy_class, "q": policy_class},
            {
                "policy_mapping_fn": policy_of,
                "num_envs_per_worker": envs,
                "rollout_fragment_length": fragment,
                "seed": 1,
                "explore": False,
                "sample_collector": collector,
                "model": SMALL,
                **config,
            },
        )
        for policy in worker.policy_map.values():
            policy.view_requirements.update(views)
        workers.append(worker)
    return workers


def assert_same_batches(columns, rows):
    assert columns.env_steps() == rows.env_steps()
    assert columns.policy_batches.keys() == rows.policy_batches.keys()
    for policy_id, batch in columns.policy_batches.items():
        found, expected = segments_of(batch), segments_of(rows.policy_batches[policy_id])
        assert found.keys() == expected.keys()
        for key, segment in found.items():
            assert_same(segment, expected[key])


def segments_of(batch):
    """Return the rows of each agent in a fragment by environment, episode, agent and first step."""
    (cuts,) = np.diff(batch["unroll_id"]).nonzero()
    ends = [*(cuts + 1).tolist(), batch.count]
    segments = {}
    for begin, end in zip([0, *ends], ends, strict=False):
        rows = batch[begin:end]
        key = tuple(int(rows[name][0]) for name in ("env_id", "eps_id", "agent_index", "t"))
        segments[key] = rows
    assert len(segments) == len(ends)
    return segments


def metrics_of(worker):
    return [
        (round(e.episode_return, 3), e.episode_length, e.env_id, sorted(e.agent_returns))
        for e in worker.get_metrics()
    ]


KINDS = st.sampled_from(["random", "turns", "always"])
SEEDS = st.integers(0, 10_000)


@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 9),
    envs=st.integers(1, 3),
    horizon=st.sampled_from([None, 2, 4]),
    soft=st.booleans(),
    no_done_at_end=st.booleans(),
    normalize=st.booleans(),
    count_steps_by=st.sampled_from(["env_steps", "agent_steps"]),
    fail_at=st.sampled_from([None, 3, 8]),
)
@settings(max_examples=20)
def test_columns_equal_rows(
    kind, seed, fragment, envs, horizon, soft, no_done_at_end, normalize, count_steps_by, fail_at
):
    columns, rows = pair(
        kind,
        fragment,
        envs,
        seed,
        fail_at,
        horizon=horizon,
        soft_horizon=soft and horizon is not None,
        no_done_at_end=no_done_at_end,
        normalize_observations=normalize,
        normalize_rewards=normalize,
        count_steps_by=count_steps_by,
    )
    for _ in range(4):
        assert_same_batches(columns.sample(), rows.sample())
        one, other = columns.reply_tags(), rows.reply_tags()
        for name in ("faulty_episodes", "env_restarts", "env_steps", "agent_steps"):
            assert one[name] == other[name]
        if soft and horizon and fail_at:
            continue  # the rows count the first observation of an episode that is dropped
        for updates, expected in zip(one["filters"], other["filters"], strict=True):
            assert updates.keys() == expected.keys()
            for policy_id, kinds in updates.items():
                for filter_kind, fresh in kinds.items():
                    for name, value in fresh.items():
                        known = expected[policy_id][filter_kind][name]
                        assert np.allclose(value, known, rtol=1e-4), (policy_id, filter_kind, name)
    assert metrics_of(columns) == metrics_of(rows)


@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 9),
    envs=st.integers(1, 3),
    normalize=st.booleans(),
    count_steps_by=st.sampled_from(["env_steps", "agent_steps"]),
    fail_at=st.sampled_from([None, 3, 8]),
)
@settings(max_examples=10)
def test_whole_episodes_equal_rows(kind, seed, fragment, envs, normalize, count_steps_by, fail_at):
    workers = pair(
        kind,
        fragment,
        envs,
        seed,
        fail_at,
        normalize_rewards=normalize,
        count_steps_by=count_steps_by,
        batch_mode="complete_episodes",
    )
    found = []
    for worker in workers:
        segments = {}
        while len({key[2] for key in segments}) < 12:
            batch = worker.sample()
            steps = batch.env_steps() if count_steps_by == "env_steps" else batch.agent_steps()
            assert steps >= fragment * envs
            for policy_id, rows in batch.policy_batches.items():
                segments |= {(policy_id, *key): part for key, part in segments_of(rows).items()}
        found.append(segments)
    shared = found[0].keys() & found[1].keys()
    assert len({key[2] for key in shared}) > 6
    for key in sorted(shared):
        columns, rows = found[0][key], found[1][key]
        if normalize:  # the scale depends on the episodes before
            names = ("obs", "new_obs", "actions", "t", "terminateds", "truncateds", "vf_preds")
            assert all(np.allclose(columns[name], rows[name], atol=1e-6) for name in names)
        else:
            assert_same(columns, rows)


SHIFTS = st.one_of(
    st.integers(-4, 2),
    st.lists(st.integers(-4, 2), min_size=1, max_size=3),
    st.tuples(st.integers(-5, 0), st.integers(0, 2)).map(lambda ab: f"{ab[0]}:{ab[1]}"),
)


@given(
    kind=KINDS,
    seed=SEEDS,
    shift=SHIFTS,
    column=st.sampled_from(["obs", "actions", "rewards", "terminateds", "dones", "vf_preds"]),
    fragment=st.integers(1, 7),
    soft=st.sampled_from([None, 2, 3]),
)
@settings(max_examples=10)
def test_views_equal_rows(kind, seed, shift, column, fragment, soft):
    view = ViewRequirement(column, shift=shift)
    if column == "vf_preds":
        view.space = gym.spaces.Box(-1, 1, (), np.float32)
    columns, rows = pair(
        kind, fragment, seed=seed, views={"view": view}, horizon=soft, soft_horizon=bool(soft)
    )
    for _ in range(4):
        assert_same_batches(columns.sample(), rows.sample())


MODELS = {"lstm": {**RECURRENT, "lstm_use_prev_action": True}, "attention": ATTENTION}


@pytest.mark.parametrize("model", MODELS)
@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 9),
    max_seq_len=st.integers(1, 4),
    soft=st.sampled_from([None, 3]),
    batch_mode=st.sampled_from(["truncate_episodes", "complete_episodes"]),
)
@settings(max_examples=4)
def test_memory_equals_rows(model, kind, seed, fragment, max_seq_len, soft, batch_mode):
    whole = batch_mode == "complete_episodes"
    columns, rows = pair(
        kind,
        fragment,
        1 if whole else 2,  # whole episodes of several environments are returned in another order
        seed,
        horizon=soft,
        soft_horizon=bool(soft) and not whole,
        batch_mode=batch_mode,
        model={**SMALL, **MODELS[model], "max_seq_len": max_seq_len},
    )
    for _ in range(3):
        assert_same_batches(columns.sample(), rows.sample())
    assert metrics_of(columns) == metrics_of(rows)


class Seen(PPOTorchPolicy):
    """Records the observation of each action."""

    defers_values = False

    def compute_actions(self, obs_batch, explore=True, state_batches=None):
        actions, states, extra = super().compute_actions(obs_batch, explore, state_batches)
        return actions, states, {**extra, "seen": np.array(obs_batch)}


class SeenByAgent(Seen):
    """Postprocesses the rows of each agent."""

    def postprocess_trajectory(self, batch, other_batches=None, episode=None):
        return super().postprocess_trajectory(batch, other_batches, episode)


@pytest.mark.parametrize("policy_class", [Seen, SeenByAgent])
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("kind", ["always", "turns", "random"])
def test_observations_are_those_of_the_actions_if_the_filter_changes(
    policy_class, batch_mode, kind
):
    for seed in range(3):
        columns, _ = pair(
            kind, 2, seed=seed, policy_class=policy_class, normalize_observations=True,
            batch_mode=batch_mode,
        )  # fmt: skip
        for k in range(10):
            if k == 5:  # in a restored sampler, too
                restored, _ = pair(
                    kind, 2, seed=seed, policy_class=policy_class, normalize_observations=True,
                    batch_mode=batch_mode,
                )  # fmt: skip
                restored.load_state_dict(columns.state_dict())
                assert restored.load_sampling_state_dict(columns.sampling_state_dict()) == 0
                columns = restored
            for batch in columns.sample().policy_batches.values():
                np.testing.assert_allclose(batch["obs"], batch["seen"], atol=1e-6)
            for updates in columns.reply_tags()["filters"]:
                for policy_id, update in updates.items():
                    columns.policy_map[policy_id].merge_filter_updates(update)


class Recorder(DefaultCallbacks):
    """Records what callbacks see of each agent."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, event, episode):
        agents = {
            agent: (
                episode.agent_index(agent),
                episode.last_observation_for(agent).tolist(),
                episode.last_raw_obs_for(agent).tolist(),
                episode.last_action_for(agent),
                episode.prev_action_for(agent),
                episode.last_reward_for(agent),
                episode.prev_reward_for(agent),
                episode.last_info_for(agent),
                episode.is_done(agent),
            )
            for agent in sorted(episode.get_agents())
        }
        returns = sorted(episode.agent_rewards.items())
        known = episode.worker.episode(episode.episode_id) is episode
        total = episode.total_reward
        self.seen.append(
            (
                event,
                episode.env_id,
                episode.length,
                total,
                agents,
                returns,
                episode.is_faulty,
                known,
            )
        )
        episode.custom_metrics["events"] = episode.custom_metrics.get("events", 0) + 1

    def on_episode_start(self, *, episode, **kwargs):
        self.note("start", episode)

    def on_episode_end(self, *, episode, **kwargs):
        self.note("end", episode)


class StepRecorder(Recorder):
    def on_episode_step(self, *, episode, **kwargs):
        self.note("step", episode)


@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 7),
    soft=st.sampled_from([None, 2]),
    normalize=st.booleans(),
    fail_at=st.sampled_from([None, 4]),
    recorder=st.sampled_from([Recorder, StepRecorder]),
)
@settings(max_examples=10)
def test_callbacks_see_the_same_as_with_rows(
    kind, seed, fragment, soft, normalize, fail_at, recorder
):
    columns, rows = pair(
        kind,
        fragment,
        2,
        seed,
        fail_at,
        horizon=soft,
        soft_horizon=bool(soft),
        normalize_observations=normalize,
        callbacks_class=recorder,
    )
    for _ in range(3):
        assert_same_batches(columns.sample(), rows.sample())
    for one, other in zip(columns.callbacks.seen, rows.callbacks.seen, strict=True):
        assert one == other
    events = [
        [e.custom_metrics["events"] for e in worker.get_metrics()] for worker in (columns, rows)
    ]
    assert events[0] == events[1]


@pytest.mark.parametrize("model", ["plain", *MODELS])
@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 6),
    soft=st.sampled_from([None, 3]),
    batch_mode=st.sampled_from(["truncate_episodes", "complete_episodes"]),
)
@settings(max_examples=3)
def test_restored_sampler_continues_exactly(model, kind, seed, fragment, soft, batch_mode):
    config = {
        "kind": kind,
        "fragment": fragment,
        "seed": seed,
        "horizon": soft,
        "soft_horizon": bool(soft) and batch_mode == "truncate_episodes",
        "batch_mode": batch_mode,
        "normalize_observations": True,
        "normalize_rewards": True,
        "callbacks_class": Recorder,
        "model": {**SMALL, **MODELS.get(model, {})},
    }
    whole, _ = pair(**config)
    restored, _ = pair(**config)
    for _ in range(3):
        whole.sample()
    restored.load_state_dict(whole.state_dict())
    assert restored.load_sampling_state_dict(whole.sampling_state_dict()) == 0
    whole.get_metrics()
    seen = len(whole.callbacks.seen)
    for _ in range(3):
        batch, other = whole.sample(), restored.sample()
        assert batch.env_steps() == other.env_steps()
        for policy_id, rows in batch.policy_batches.items():
            for name in set(rows) - {"infos"}:
                assert np.array_equal(rows[name], other.policy_batches[policy_id][name]), name
    assert metrics_of(whole) == metrics_of(restored)
    assert whole.callbacks.seen[seen:] == restored.callbacks.seen


class SeesOthers(PPOTorchPolicy):
    """Adds the number of rows and the rewards of the other agents, and the episode's length."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        others = [rows for _, rows in (other_agent_batches or {}).values()]
        totals = np.full(batch.count, sum(float(rows["rewards"].sum()) for rows in others))
        counts = np.full(batch.count, sum(rows.count for rows in others))
        lengths = np.full(batch.count, episode.length)
        return batch.with_columns(others_reward=totals, others_count=counts, length=lengths)


class AddsColumn(DefaultCallbacks):
    def on_postprocess_trajectory(
        self, *, episode, agent_id, postprocessed_batch, original_batches, **kwargs
    ):
        known = len(original_batches), agent_id, episode.episode_id
        postprocessed_batch["known"] = np.tile(known, (postprocessed_batch.count, 1))
        self.calls = [*getattr(self, "calls", []), ("postprocess", episode.env_id, agent_id)]

    def on_episode_end(self, *, episode, **kwargs):
        self.calls = [*getattr(self, "calls", []), ("end", episode.env_id)]


@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 7),
    soft=st.sampled_from([None, 3]),
    normalize=st.booleans(),
    fail_at=st.sampled_from([None, 4]),
    custom=st.sampled_from(["policy", "callback", "both"]),
    batch_mode=st.sampled_from(["truncate_episodes", "complete_episodes"]),
)
@settings(max_examples=10)
def test_postprocessing_of_each_agent_equals_rows(
    kind, seed, fragment, soft, normalize, fail_at, custom, batch_mode
):
    whole = batch_mode == "complete_episodes"
    columns, rows = pair(
        kind,
        fragment,
        1 if whole else 2,
        seed,
        fail_at,
        policy_class=PPOTorchPolicy if custom == "callback" else SeesOthers,
        horizon=soft,
        soft_horizon=bool(soft) and not whole,
        normalize_observations=normalize,
        batch_mode=batch_mode,
        callbacks_class=DefaultCallbacks if custom == "policy" else AddsColumn,
    )
    for _ in range(3):
        assert_same_batches(columns.sample(), rows.sample())
    assert metrics_of(columns) == metrics_of(rows)
    if custom != "policy":
        ends = [[c for c in w.callbacks.calls if c[0] == "end"] for w in (columns, rows)]
        assert ends[0] == ends[1]
        assert sorted(map(str, columns.callbacks.calls)) == sorted(map(str, rows.callbacks.calls))


@given(
    kind=KINDS,
    seed=SEEDS,
    fragment=st.integers(1, 7),
    shift=st.one_of(st.integers(-3, 0), st.just([-2, 0]), st.just("-3:0")),
    column=st.sampled_from(["obs", "actions", "rewards", "dones", "terminateds"]),
    agents=st.sampled_from(["others", [0, 3]]),
    soft=st.sampled_from([None, 3]),
    fail_at=st.sampled_from([None, 4]),
    normalize=st.booleans(),
)
@settings(max_examples=15)
def test_views_of_other_agents_equal_rows(
    kind, seed, fragment, shift, column, agents, soft, fail_at, normalize
):
    if soft and column != "obs":
        shift = -2  # rows know no outcomes after a soft horizon
    view = ViewRequirement(column, shift=shift, agents=agents)
    columns, rows = pair(
        kind, fragment, 2, seed, fail_at, {"others": view}, horizon=soft, soft_horizon=bool(soft),
        normalize_observations=normalize,
    )  # fmt: skip
    for _ in range(4):
        assert_same_batches(columns.sample(), rows.sample())
