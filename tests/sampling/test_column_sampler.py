"""Sampling in columns returns the same rows as a collector that gets them one by one."""

import gymnasium as gym
import numpy as np
import optree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.fragment_columns import FragmentColumns
from flowrl.envs import make_multi_agent
from flowrl.policies import ViewRequirement
from flowrl.sampling import RolloutWorker, SimpleListCollector
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.segments import SegmentTracker

from .fakes import CountEnv, Idle

ID_COLUMNS = ("eps_id", "unroll_id")


class Uneven(CountEnv):
    """Episodes of 1 to `length` steps, in an order that depends on the episode's number."""

    def reset(self, **kwargs):
        self.longest = getattr(self, "longest", self.length)
        obs, info = super().reset(**kwargs)
        self.length = 1 + (5 * self.episode + 2) % self.longest
        return obs, info


class Nested(Uneven):
    """Uneven with observations and actions in dicts."""

    observation_space = gym.spaces.Dict(
        count=gym.spaces.Box(-1.0, 1e6, (2,), np.float32),
        pair=gym.spaces.Tuple((gym.spaces.Discrete(100), gym.spaces.Box(0, 255, (2, 2), np.uint8))),
    )
    action_space = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=gym.spaces.Box(-1, 1, (2,)))

    def observe(self):
        image = np.full((2, 2), self.steps, np.uint8)
        return {"count": super().observe().copy(), "pair": (min(self.episode, 99), image)}


RECURRENT = {"use_lstm": True, "lstm_cell_size": 3}
ATTENTION = {"use_attention": True, "attention_dim": 4, "attention_num_heads": 1}
SMALL = {"fcnet_hiddens": [4]}


def pair(length=3, fragment=7, envs=2, views=(), env=CountEnv, **config):
    """Return a worker that samples in columns and one that samples rows, otherwise equal."""
    workers = []
    for collector in (None, SimpleListCollector):
        settings = {
            "num_envs_per_worker": envs,
            "rollout_fragment_length": fragment,
            "seed": 1,
            "sample_collector": collector,
            **config,
        }
        worker = RolloutWorker(lambda context: env(length), PPOTorchPolicy, settings)
        worker.policy.view_requirements.update(views)
        workers.append(worker)
    return workers


def assert_same(columns, rows):
    assert set(columns) == set(rows)
    for name in columns:
        a, b = columns[name], rows[name]
        if isinstance(a, (dict, tuple)):
            leaves = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
            for one, other in leaves:
                assert one.dtype == other.dtype, name
                assert np.allclose(one, other, atol=1e-6), (name, a, b)
            continue
        assert a.dtype == b.dtype, name
        if name in ID_COLUMNS:
            assert np.array_equal(np.diff(a) != 0, np.diff(b) != 0), name
        elif name == "infos":
            assert a.tolist() == b.tolist()
        else:
            assert np.allclose(a, b, atol=1e-6), (name, a, b)


def assert_same_episodes(columns, rows):
    episodes = [sorted(tuple(e[:3]) for e in worker.get_metrics()) for worker in (columns, rows)]
    assert episodes[0] == episodes[1]
    assert columns.env_steps == rows.env_steps


@given(
    length=st.integers(1, 6),
    fragment=st.integers(1, 9),
    envs=st.integers(1, 3),
    horizon=st.sampled_from([None, 2, 4]),
    soft=st.booleans(),
    no_done_at_end=st.booleans(),
    normalize=st.booleans(),
)
@settings(max_examples=30)
def test_rows_equal_columns(length, fragment, envs, horizon, soft, no_done_at_end, normalize):
    columns, rows = pair(
        length,
        fragment,
        envs,
        horizon=horizon,
        soft_horizon=soft and horizon is not None,
        no_done_at_end=no_done_at_end,
        normalize_observations=normalize,
        normalize_rewards=normalize,
    )
    if normalize:
        stats = {"count": 9.0, "mean": np.array([1.0, 2.0]), "m2": np.array([20.0, 30.0])}
        for worker in (columns, rows):
            worker.policy.observation_filter.load_state_dict(stats)
    for _ in range(3):
        assert_same(columns.sample(), rows.sample())
        # updates of the filters
        for one, other in zip(columns.reply_tags()["filters"], rows.reply_tags()["filters"]):  # noqa: B905
            for kind, fresh in one["default_policy"].items():
                for name, value in fresh.items():
                    assert np.allclose(value, other["default_policy"][kind][name]), (kind, name)
    assert columns.env_steps == rows.env_steps


def test_rows_equal_columns_for_normalized_float64_observations():
    class Float64(CountEnv):
        observation_space = gym.spaces.Box(-1.0, 1e6, (2,), np.float64)

        def observe(self):
            return super().observe().astype(np.float64)

    columns, rows = pair(3, 8, 2, env=Float64, normalize_observations=True)
    assert_same(columns.sample(), rows.sample())


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([None, 2, 4]), st.booleans())
@settings(max_examples=10)
def test_episode_metrics_equal_columns(length, fragment, horizon, soft):
    columns, rows = pair(length, fragment, horizon=horizon, soft_horizon=soft and bool(horizon))
    for _ in range(4):
        columns.sample(), rows.sample()
    assert_same_episodes(columns, rows)


SHIFTS = st.one_of(
    st.integers(-4, 3),
    st.lists(st.integers(-4, 3), min_size=1, max_size=3),
    st.tuples(st.integers(-5, 0), st.integers(0, 3)).map(lambda ab: f"{ab[0]}:{ab[1]}"),
)


@given(
    SHIFTS,
    st.sampled_from(["obs", "actions", "rewards", "terminateds", "dones", "vf_preds"]),
    st.integers(1, 6),
    st.integers(1, 7),
    st.sampled_from([None, 2, 3]),
)
@settings(max_examples=30)
def test_views_equal_columns(shift, column, length, fragment, soft):
    from gymnasium.spaces import Box

    view = ViewRequirement(column, shift=shift)
    if column == "vf_preds":
        view.space = Box(-1, 1, (), np.float32)
    columns, rows = pair(
        length,
        fragment,
        views={"view": view},
        horizon=soft,
        soft_horizon=soft is not None,
    )
    for _ in range(4):
        assert_same(columns.sample(), rows.sample())


MODELS = {
    "plain": {},
    "lstm": RECURRENT,
    "lstm with actions": {**RECURRENT, "lstm_use_prev_action": True, "lstm_use_prev_reward": True},
    "attention": {**ATTENTION, "attention_memory": 3},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("env", [Uneven, Nested])
@given(
    length=st.integers(1, 7),
    fragment=st.integers(1, 9),
    envs=st.integers(1, 3),
    max_seq_len=st.integers(1, 4),
    soft=st.sampled_from([None, 3]),
)
@settings(max_examples=6)
def test_memory_and_nested_spaces_equal_columns(
    model, env, length, fragment, envs, max_seq_len, soft
):
    columns, rows = pair(
        length,
        fragment,
        envs,
        env=env,
        horizon=soft,
        soft_horizon=soft is not None,
        model={**SMALL, **MODELS[model], "max_seq_len": max_seq_len},
    )
    for _ in range(3):
        assert_same(columns.sample(), rows.sample())
    assert_same_episodes(columns, rows)


@pytest.mark.parametrize("model", MODELS)
@given(
    length=st.integers(1, 7),
    fragment=st.integers(1, 9),
    envs=st.integers(1, 3),
    normalize=st.booleans(),
)
@settings(max_examples=6)
def test_whole_episodes_equal_columns(model, length, fragment, envs, normalize):
    columns, rows = pair(
        length,
        fragment,
        envs,
        env=Uneven,
        batch_mode="complete_episodes",
        normalize_rewards=normalize,
        explore=False,
        model={**SMALL, **MODELS[model], "max_seq_len": 3},
    )
    episodes = []
    for worker in (columns, rows):
        found = {}
        while not all(any(key[0] == env and key[1] >= 5 for key in found) for env in range(envs)):
            batch = worker.sample()
            assert batch.count >= fragment * envs
            for part in batch.split_by_episode():
                found[int(part["env_id"][0]), int(part["obs"][0, 0])] = part
        episodes.append({key: part for key, part in found.items() if key[1] <= 5})
    assert episodes[0].keys() == episodes[1].keys()
    for key, part in episodes[0].items():
        other = episodes[1][key]
        assert part["t"].tolist() == list(range(part.count))
        assert len(set(part["unroll_id"])) == 1
        for name in set(part) - {"eps_id", "unroll_id", "infos", "rewards", "seq_lens"}:
            if normalize and name in ("advantages", "value_targets", "next_values"):
                continue  # the scale depends on the episodes before
            assert np.allclose(part[name], other[name], atol=1e-5), name


class Recorder(DefaultCallbacks):
    """Records what callbacks see of each episode."""

    def note(self, event, episode):
        last, previous = episode.last_action_for(), episode.prev_action_for()
        self.seen = getattr(self, "seen", [])
        self.seen.append(
            (
                event,
                episode.env_id,
                episode.length,
                episode.total_reward,
                episode.last_observation_for().tolist(),
                episode.last_raw_obs_for().tolist(),
                None if last is None else int(last),
                None if previous is None else int(previous),
                episode.last_reward_for(),
                episode.prev_reward_for(),
                episode.last_info_for(),
                episode.is_done(),
                episode.is_faulty,
                episode.worker.episode(episode.episode_id) is episode,
            )
        )
        episode.user_data["events"] = episode.user_data.get("events", 0) + 1
        episode.custom_metrics["events"] = episode.user_data["events"]

    def on_episode_start(self, *, episode, **kwargs):
        self.note("start", episode)

    def on_episode_step(self, *, episode, **kwargs):
        self.note("step", episode)

    def on_episode_end(self, *, episode, **kwargs):
        self.note("end", episode)


@given(
    length=st.integers(1, 6),
    fragment=st.integers(1, 7),
    envs=st.integers(1, 3),
    horizon=st.sampled_from([None, 2]),
    soft=st.booleans(),
    normalize=st.booleans(),
)
@settings(max_examples=12)
def test_callbacks_see_the_same_as_with_rows(length, fragment, envs, horizon, soft, normalize):
    columns, rows = pair(
        length,
        fragment,
        envs,
        env=Uneven,
        horizon=horizon,
        soft_horizon=soft and horizon is not None,
        normalize_observations=normalize,
        callbacks_class=Recorder,
    )
    for _ in range(3):
        assert_same(columns.sample(), rows.sample())
    assert columns.callbacks.seen == rows.callbacks.seen
    metrics = [sorted((*e[:3], e.custom_metrics["events"]) for e in w.get_metrics())
               for w in (columns, rows)]  # fmt: skip
    assert metrics[0] == metrics[1]


def test_callbacks_see_a_failure_as_with_rows():
    seen = []
    for collector in (None, SimpleListCollector):
        created = []

        def make(context, created=created):
            created.append(context.vector_index)
            fails = context.vector_index == 1 and created.count(1) == 1
            return Uneven(7, (0, 2) if fails else None, OSError)

        settings = {
            "num_envs_per_worker": 2, "rollout_fragment_length": 3, "seed": 1, "explore": False,
            "sample_collector": collector, "callbacks_class": Recorder, "model": SMALL,
        }  # fmt: skip
        worker = RolloutWorker(make, PPOTorchPolicy, settings)
        for _ in range(4):
            worker.sample()
        seen.append(worker.callbacks.seen)
    assert seen[0] == seen[1]
    assert [is_faulty for *_, is_faulty, _ in seen[0]].count(True) == 1


@pytest.mark.parametrize("model", ["plain", "lstm with actions", "attention"])
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("env", [Uneven, Nested])
@pytest.mark.parametrize("soft", [None, 3])
def test_restored_sampler_continues_exactly(model, batch_mode, env, soft):
    if batch_mode == "complete_episodes" and soft:
        pytest.skip("soft horizons are for fragments")
    config = {
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 7,
        "batch_mode": batch_mode,
        "horizon": soft,
        "soft_horizon": soft is not None,
        "seed": 1,
        "normalize_rewards": True,
        "callbacks_class": CountingCallbacks,
        "model": {**SMALL, **MODELS[model], "max_seq_len": 3},
    }

    class Random(env):  # its episodes depend on its random generator alone
        def reset(self, **kwargs):
            gym.Env.reset(self, seed=kwargs.get("seed"))
            self.episode = int(self.np_random.integers(50))
            return super().reset()

    whole, first, second = (
        RolloutWorker(lambda context: Random(5), PPOTorchPolicy, config) for _ in range(3)
    )
    for _ in range(2):
        whole.sample(), first.sample()
    second.load_state_dict(first.state_dict())
    second.policy.load_filter_state_dict(first.policy.filter_state_dict())
    assert second.load_sampling_state_dict(first.sampling_state_dict()) == 0
    whole.get_metrics()
    for _ in range(3):
        expected, found = whole.sample(), second.sample()
        assert_same(expected, found)
        for name in ID_COLUMNS:
            assert expected[name].tolist() == found[name].tolist()
    assert whole.get_metrics() == second.get_metrics()


class CountingCallbacks(DefaultCallbacks):
    """Counts the steps of each episode in a custom metric."""

    def on_episode_step(self, *, episode, **kwargs):
        episode.custom_metrics["steps"] = episode.custom_metrics.get("steps", 0) + 1


class PerSegment(PPOTorchPolicy):
    """Postprocesses each segment separately."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        assert len(set(sample_batch["eps_id"])) == 1
        return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)


@pytest.mark.parametrize("use_gae", [True, False])
def test_postprocessing_segments_equals_postprocessing_together(use_gae):
    batches = []
    for policy in (PPOTorchPolicy, PerSegment):
        worker = RolloutWorker(
            lambda context: CountEnv(3),
            policy,
            {
                "num_envs_per_worker": 2,
                "rollout_fragment_length": 7,
                "seed": 1,
                "use_gae": use_gae,
                "sample_collector": SimpleListCollector,
            },
        )
        batches.append([worker.sample() for _ in range(3)])
    for whole, segments in zip(*batches, strict=True):
        order = [np.lexsort((b["t"], b["unroll_id"])) for b in (whole, segments)]
        assert_same(whole.take_rows(order[0]), segments.take_rows(order[1]))


def test_observations_are_stored_once():
    _, rows = pair(fragment=50)
    batch = rows.sample()
    stored = dict(batch.stored())
    assert stored["new_obs"].base is stored["obs"].base
    joined = SampleBatch.concat_samples([batch, rows.sample()])
    assert joined["new_obs"].shape == joined["obs"].shape


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ([0, np.array([0]), 0, np.array([1])], "must have 6 entries"),
        ([-1, *[np.array([0])] * 5], "the row must be an integer of at least 0"),
        ([3, np.array([0]), 0, np.array([1]), "x", np.array([0])], "arrays of integers of equal"),
        ([3, np.array([9]), 0, *[np.array([0])] * 3], "environments or rows that do not exist"),
        ([3, np.array([0]), 0, np.array([1]), np.array([0]), np.array([99])], "do not exist"),
        ([3, np.array([0]), 7, *[np.array([0])] * 3], "must be an integer from 0 to 3"),
    ],
)
def test_damaged_events_are_rejected(event, problem):
    tracker = SegmentTracker(2, 0, None, whole=True)
    tracker.start()
    tracker.record_ends(2, [0], np.zeros((1, 1)), (), ())
    state = tracker.state_dict()
    SegmentTracker(2, 0, None, whole=True).load_state_dict(state)
    with pytest.raises(ValueError, match=problem):
        tracker.load_state_dict({**state, "events": [event]})


@pytest.mark.parametrize("is_shared", [True, False])
def test_shared_columns_are_saved_once(is_shared):
    columns = FragmentColumns(2, 4, 0)
    columns.allocate("raw_obs", (3,), np.dtype(np.float32))[:] = np.arange(3)
    columns.share("obs", "raw_obs")
    state = columns.state_dict(2)
    assert state["rows"]["obs"] == "raw_obs"
    loaded = FragmentColumns(2, 4, 0)
    loaded.allocate("raw_obs", (3,), np.dtype(np.float32))
    if is_shared:
        loaded.share("obs", "raw_obs")
    loaded.load_state_dict(state)
    assert (loaded.arrays["obs"] is loaded.arrays["raw_obs"]) == is_shared
    for name in ("raw_obs", "obs"):
        np.testing.assert_array_equal(loaded.arrays[name][:3], state["rows"]["raw_obs"])


class Long(Uneven):
    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.length = 50
        return obs, info


def test_restarted_environment_keeps_the_next_observation_of_a_soft_horizon():
    """A whole episode that a soft horizon ended at the last row waits for the next fragment."""
    config = {
        "num_envs_per_worker": 3, "rollout_fragment_length": 1, "batch_mode": "complete_episodes",
        "horizon": 3, "soft_horizon": True, "seed": 1, "vectorization_mode": "sync",
        "model": SMALL,
    }  # fmt: skip
    workers = [RolloutWorker(lambda c: Long(), PPOTorchPolicy, config) for _ in range(2)]
    workers[0].sample()
    workers[1].load_state_dict(workers[0].state_dict())
    assert workers[1].load_sampling_state_dict(workers[0].sampling_state_dict()) == 3
    for _ in range(2):
        expected, resumed = (worker.sample() for worker in workers)
        for name in ("new_obs", "advantages", "value_targets", "terminateds"):
            np.testing.assert_array_equal(resumed[name], expected[name], name)


@pytest.mark.parametrize("agents", [1, 2])
def test_shorter_horizon_of_a_resumed_run_ends_running_episodes(agents):
    env = (lambda c: Long()) if agents == 1 else make_multi_agent(lambda c: Long())

    def worker(horizon, soft):
        config = {"horizon": horizon, "soft_horizon": soft, "rollout_fragment_length": 10}
        return RolloutWorker(env, Idle, config)

    for soft in (False, True) if agents == 2 else (True,):
        before, after = worker(40, soft), worker(5, soft)
        before.sample()
        after.load_sampling_state_dict(before.sampling_state_dict())
        after.sample()
        first, *_ = after.get_metrics()
        assert first.episode_length > 10
